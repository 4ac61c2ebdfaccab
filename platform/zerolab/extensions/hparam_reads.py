"""Tracking of hyperparameter reads, to warn of searched values that a trial never uses.

:func:`tracked` returns the mapping that a trial gets: a ``dict`` that records each read. Code
that takes everything (``dict(**hparams)``, ``json.dumps(hparams)``, ``for name, value in
hparams.items()``) has read everything. The record belongs to this process, which runs one trial,
and to the processes that it forks, such as the workers of a data loader.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
import mmap
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from zerolab.contract.hparam_reads import join, searched_names
from zerolab.contract.run_folder import RunFolder
from zerolab.files import write_json

if TYPE_CHECKING:
    from zerolab.contract.spec import RunSpec

__all__ = [
    "TrackedHparams",
    "as_trial_hparams",
    "note_read",
    "tracked",
    "warn_of_unread",
]

logger = logging.getLogger(__name__)

_read: set[str] = set()
"""Dotted paths; one that ends in ``.*`` means everything below."""

_FORKED_BYTES = 1 << 16
_forked: dict[str, int] = {}
"""Indices of the same paths in :data:`_flags`."""
_flags: list[mmap.mmap] = []
"""Memory shared with forked processes; a byte that is not 0 marks a path that was read."""

_SOURCES = (".py", ".sh", ".bash", ".ipynb")
_MOST_FILES = 500
_READS_FILE = (b"RUN_SPEC", b"info.hparams", b"spec.hparams")
_MAY_READ = (b"hparam", b"hyperparam")
"""Text of code that may read hyperparameters in a way that is not tracked."""


class TrackedHparams(dict[str, Any]):
    """Hyperparameters, or a block of them, with a record of reads.

    Args:
        content: Their names and values.
        path: Dotted path of the block; empty for all hyperparameters.
    """

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        super().__init__({key: tracked(content[key], join(path, key)) for key in content})
        self._path = path

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        note_read(join(self._path, key), with_children=not isinstance(value, TrackedHparams))
        return value

    def __missing__(self, key: str) -> NoReturn:
        import difflib  # only an error needs it

        close = difflib.get_close_matches(str(key), [*map(str, super().keys())], 1)
        raise KeyError(f"{key}; did you mean {close[0]!r}?" if close else key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return one value, as ``dict.get`` does."""
        return self[key] if super().__contains__(key) else default

    def pop(self, key: str, *default: Any) -> Any:
        """Remove and return one value, as ``dict.pop`` does."""
        note_read(join(self._path, key))
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """Remove and return the last pair."""
        key, value = super().popitem()
        note_read(join(self._path, key))
        return key, value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return one value; store the default first if the key is missing."""
        note_read(join(self._path, key))
        return super().setdefault(key, default)

    def __contains__(self, key: object) -> bool:
        note_read(join(self._path, key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # With this one, `dict(self)`, `update(self)` and `f(**self)` read by __getitem__.
        for key in super().__iter__():
            is_block = isinstance(super().__getitem__(key), TrackedHparams)
            note_read(join(self._path, key), with_children=not is_block)
            yield key

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the pairs; iteration counts as a read."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the values; iteration counts as a read."""
        return ValuesView(self)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the names."""
        return KeysView(self)

    def copy(self) -> TrackedHparams:
        """Return a copy that records its reads, too."""
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
    """Copy a value so that its mappings record reads."""
    if isinstance(value, Mapping):
        if not path:
            _register_with_yaml()
            _share(value)
        plain = dict.items(value) if isinstance(value, dict) else value.items()
        return TrackedHparams(dict(plain), path)
    return copy.deepcopy(value)


def as_trial_hparams(value: Any) -> Any:
    """Return tracked hyperparameters in the form for a trial's code.

    OmegaConf accepts no subclass of ``dict``. If it is installed, blocks become plain mappings and
    count as read completely.
    """
    if not isinstance(value, TrackedHparams) or not _has_omegaconf():
        return value
    return {key: as_trial_hparams(inner) for key, inner in value.items()}


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


def note_read(path: str, *, with_children: bool = True) -> None:
    """Record that a hyperparameter was read.

    Args:
        path: Its dotted path.
        with_children: Count everything below the path as read, too.
    """
    name = f"{path}.*" if with_children else path
    _read.add(name)
    if name in _forked:
        _flags[0][_forked[name]] = 1


def _share(content: Mapping[str, Any], path: str = "") -> None:
    """Have forked processes record their reads in shared memory."""
    if not _flags:
        _flags.append(mmap.mmap(-1, _FORKED_BYTES))
    for key, value in dict(content).items():
        key_path = join(path, key)
        for name in (key_path, f"{key_path}.*"):
            if len(_forked) < _FORKED_BYTES:
                _forked.setdefault(name, len(_forked))
        if isinstance(value, Mapping):
            _share(value, key_path)


def warn_of_unread(spec: RunSpec) -> None:
    """Warn of the hyperparameters that are searched and that this process never read.

    The names go to the server at the end of the run, too.

    Args:
        spec: Of a run that ends without an error.
    """
    names = searched_names(spec.config.get("hyperparameters"))
    searched = [path for path in names if _exists(spec.hparams, path)]
    if not spec.trial_id or not searched or _gets_overrides(spec):
        return
    _read.update(name for name, index in _forked.items() if _flags[0][index])
    unread = [path for path in searched if not _is_read(path)]
    if unread and _has_untracked_reads(Path(spec.model_dir)):
        return
    with suppress(OSError):
        write_json(RunFolder(Path(spec.run_dir)).unread, {"names": unread})
    if not unread:
        return
    logger.warning(
        "searched hyperparameters that the code of this trial never read: %s; read them from "
        "get_hparams(), or remove them from the search",
        ", ".join(map(repr, unread)),
    )


def _gets_overrides(spec: RunSpec) -> bool:
    """Return whether the command gets all hyperparameters as arguments."""
    from zerolab.contract.spec import Command
    from zerolab.extensions.hydra_overrides import PLACEHOLDER

    return isinstance(spec.entrypoint, Command) and PLACEHOLDER in spec.entrypoint.words


def _exists(hparams: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(hparams, Mapping) or part not in hparams:
            return False
        hparams = hparams[part]
    return True


def _is_read(path: str) -> bool:
    """Return whether a path, something below it, or a whole block above it was read."""
    parts = path.split(".")
    parents = (".".join(parts[:count]) + ".*" for count in range(1, len(parts) + 1))
    child_prefix = f"{path}."
    return (
        path in _read
        or not _read.isdisjoint(parents)
        or any(read.startswith(child_prefix) for read in _read)
    )


def _has_untracked_reads(model_dir: Path) -> bool:
    """Return whether the code may read its hyperparameters in an untracked way.

    Code that got them from Zerolab, or uses Zerolab without naming them, does not.
    """
    hints = _READS_FILE if _flags else _READS_FILE + _MAY_READ
    files = (path for path in model_dir.rglob("*") if path.suffix in _SOURCES)
    uses = False
    for path in itertools.islice(files, _MOST_FILES):
        try:
            text = path.read_bytes()
        except OSError:
            return True
        if any(word in text for word in hints):
            return True
        uses = uses or b"zerolab" in text or b"zerotrial" in text
    return not uses and not _flags
