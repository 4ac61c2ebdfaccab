"""Configuration and summary of a run: dictionaries whose values are attributes, too."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerolab.contract.hparam_reads import note_read

__all__ = ["Config", "ConfigChangeError", "Summary", "plain"]


class ConfigChangeError(Exception):
    """Change of a configuration value without ``allow_val_change=True``, as wandb's."""


class _Values:
    """Dictionary whose values are attributes, too."""

    def __init__(self) -> None:
        self.__dict__["_values"] = {}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"no value {key!r}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def keys(self) -> Any:
        """Return the names."""
        return self._values.keys()

    def items(self) -> Any:
        """Return names and values."""
        return [(key, self[key]) for key in self._values]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or a default.

        Args:
            key: Name of the value.
            default: Result if there is none.
        """
        return self[key] if key in self._values else default


class Config(_Values):
    """Configuration of a run, as ``wandb.config``.

    The hyperparameters of a trial take precedence over values of the script, as those of a sweep.

    Args:
        fixed: Hyperparameters of the trial.
        changed: Called with all values after a change.
        warn: Prints a message once.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any],
        changed: Callable[[dict[str, Any]], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.__dict__.update(_fixed=dict(fixed), _changed=changed, _warn=warn)
        self._values.update(fixed)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if key in self._fixed:
            note_read(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, values: Any, allow_val_change: bool | None = None) -> None:  # noqa: FBT001 - as wandb
        """Set values.

        Args:
            values: Dictionary, or the namespace of argparse.
            allow_val_change: Whether values may differ from existing ones.

        Raises:
            ConfigChangeError: If a value differs from the existing one.
        """
        new = plain(values if isinstance(values, Mapping) else vars(values))
        for key in sorted(new.keys() & self._values.keys()):
            old = self._values[key]
            if key in self._fixed:
                if new[key] != old:
                    self._warn(f"config: {key} keeps the value of the trial, {old!r}")
                new[key] = old
            elif not allow_val_change and new[key] != old:
                problem = f"must not change from {old!r} to {new[key]!r}"
                raise ConfigChangeError(f"config: {key}: {problem}; use allow_val_change=True")
        self._values.update(new)
        self._changed(dict(self._values))

    def setdefaults(self, values: Any) -> None:
        """Set values that are missing.

        Args:
            values: Dictionary, or the namespace of argparse.
        """
        new = values if isinstance(values, Mapping) else vars(values)
        self.update({key: value for key, value in new.items() if key not in self})

    def as_dict(self) -> dict[str, Any]:
        """Return a copy of all values."""
        return dict(self.items())


class Summary(_Values):
    """Last logged values and values that a script has set, as ``wandb.summary``."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["assigned"] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = value
        self.assigned[key] = value

    def update(self, values: Mapping[str, Any]) -> None:
        """Set values.

        Args:
            values: Names to values.
        """
        for key, value in values.items():
            self[key] = value

    def note(self, key: str, value: Any) -> None:
        """Store a logged value, unless the script has set one.

        Args:
            key: Name of the metric.
            value: Its value.
        """
        if key not in self.assigned:
            self._values[key] = value


def plain(value: Any) -> Any:
    """Convert a value of a configuration to one of JSON.

    Args:
        value: Any value; an unknown one becomes its text.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()  # of numpy or torch
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
