"""Which hyperparameters the code of a trial reads, to warn of those that are searched in vain.

:func:`tracked` makes the mapping that a trial gets. It is a ``dict`` that notes what is read. Code
that takes everything (``dict(**hparams)``, ``json.dumps(hparams)``, ``for name, value in
hparams.items()``) has read everything. The notes are of this process, which belongs to one trial.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerolab.contract.spec import RunSpec

__all__ = ["TrackedHparams", "hand_out", "note_read", "tracked", "warn_of_unread"]

logger = logging.getLogger(__name__)

_read: set[str] = set()
"""Dotted paths; one that ends in ``.*`` stands for everything below."""

_SEARCHED = frozenset({"int", "double", "log", "categorical"})
_SOURCES = (".py", ".sh", ".bash", ".ipynb")
_MOST_FILES = 500
_READS_OTHERWISE = (b"hparam", b"hyperparam", b"RUN_SPEC", b".info")
"""What stands in code that reads hyperparameters in a way that is not noted."""


class TrackedHparams(dict[str, Any]):
    """Hyperparameters, or a block of them, that note which of them are read.

    Args:
        content: Their names and values.
        path: Dotted path of the block; empty for all hyperparameters.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        super().__init__({key: tracked(content[key], _join(path, key)) for key in content})
        self._path = path

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        note_read(_join(self._path, key), whole=not isinstance(value, TrackedHparams))
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return one value, as ``dict.get`` does."""
        return self[key] if super().__contains__(key) else default

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return one value, as ``dict.pop`` does."""
        note_read(_join(self._path, key))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last pair."""
        key, value = super().popitem()
        note_read(_join(self._path, key))
        return key, value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return one value; store the default first where there is none."""
        note_read(_join(self._path, key))
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        note_read(_join(self._path, key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # With this one, `dict(self)`, `update(self)` and `f(**self)` read by __getitem__.
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the pairs; what is iterated is read."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the values; what is iterated is read."""
        return ValuesView(self)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the names."""
        return KeysView(self)

    def copy(self) -> TrackedHparams:
        """Return a copy that notes what is read of it, too."""
        return TrackedHparams(dict(super().items()), self._path)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> TrackedHparams:
        return TrackedHparams(dict(super().items()), self._path)

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**self, **other}

    def __ror__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**other, **self}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle as a plain mapping, which also loads with ``weights_only=True``."""
        from collections import OrderedDict

        return OrderedDict, (), None, None, iter([*self.items()])


def tracked(value: Any, path: str = "") -> Any:
    """Return a copy of a value whose mappings note what is read of them."""
    if isinstance(value, Mapping):
        if not path:
            _register_with_yaml()
        plain = dict.items(value) if isinstance(value, dict) else value.items()
        return TrackedHparams(dict(plain), path)
    return copy.deepcopy(value)


def hand_out(value: Any) -> Any:
    """Return what a trial gets of tracked hyperparameters.

    OmegaConf accepts no subclass of ``dict``. Where it is installed, blocks are plain mappings, and
    all of a block has been read once it is handed out.
    """
    if not isinstance(value, TrackedHparams) or not _has_omegaconf():
        return value
    return {key: hand_out(inner) for key, inner in value.items()}


@cache
def _has_omegaconf() -> bool:
    return importlib.util.find_spec("omegaconf") is not None


@cache
def _register_with_yaml() -> None:
    """Have PyYAML write tracked mappings as plain ones."""
    try:
        from yaml.representer import Representer, SafeRepresenter
    except ImportError:
        return
    for kind in (SafeRepresenter, Representer):
        kind.add_representer(TrackedHparams, SafeRepresenter.represent_dict)


def note_read(path: str, *, whole: bool = True) -> None:
    """Note that a hyperparameter was read.

    Args:
        path: Its dotted path.
        whole: All below it was read, too.
    """
    _read.add(f"{path}.*" if whole else path)


def warn_of_unread(spec: RunSpec) -> None:
    """Warn of the hyperparameters that are searched and that this process never read.

    Args:
        spec: Of a run that ends without an error.
    """
    space = spec.config.get("hyperparameters")
    if not spec.trial_id or not isinstance(space, Mapping):
        return
    searched = [path for path in _searched(space) if _exists(spec.hparams, path)]
    unread = [path for path in searched if not _is_read(path)]
    if not unread or (not _read and _may_read_otherwise(Path(spec.model_dir))):
        return
    logger.warning(
        "searched hyperparameters that the code of this trial never read: %s; read them from "
        "get_hparams(), or remove them from the search",
        ", ".join(map(repr, unread)),
    )


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _searched(space: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted paths of search specs outside of lists."""
    for key, value in space.items():
        if not isinstance(value, Mapping):
            continue
        here = _join(path, key)
        if isinstance(value.get("type"), str):
            if value["type"] in _SEARCHED:
                yield here
        else:
            yield from _searched(value, here)


def _exists(hparams: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(hparams, Mapping) or part not in hparams:
            return False
        hparams = hparams[part]
    return True


def _is_read(path: str) -> bool:
    """Whether a path was read: itself, something below it, or all of a block above it."""
    parts = path.split(".")
    above = (".".join(parts[:count]) + ".*" for count in range(1, len(parts) + 1))
    below = f"{path}."
    return (
        path in _read
        or not _read.isdisjoint(above)
        or any(read.startswith(below) for read in _read)
    )


def _may_read_otherwise(model_dir: Path) -> bool:
    """Whether the code may read its hyperparameters in a way that is not noted.

    It does not where it uses Zerolab and nothing in it speaks of hyperparameters.
    """
    files = (path for path in model_dir.rglob("*") if path.suffix in _SOURCES)
    uses = False
    for path in itertools.islice(files, _MOST_FILES):
        try:
            text = path.read_bytes()
        except OSError:
            return True
        if any(word in text for word in _READS_OTHERWISE):
            return True
        uses = uses or b"zerolab" in text or b"zerotrial" in text
    return not uses
