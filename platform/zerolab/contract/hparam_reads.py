"""Hyperparameters as a trial gets them; an extension records which ones are read."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.contract.run_folder import RunFolder
from zerolab.files import read_json
from zerolab.registry import PARTS

if TYPE_CHECKING:
    from zerolab.contract.spec import RunSpec

__all__ = [
    "as_trial_hparams",
    "join",
    "note_read",
    "read_unread",
    "searched_names",
    "tracked",
    "warn_of_unread",
]

_SEARCHED = frozenset({"int", "double", "log", "categorical"})


def tracked(value: Mapping[str, Any]) -> dict[str, Any]:
    """Copy hyperparameters so that reads of them are recorded."""
    part = PARTS.find("hparam_reads")
    copied: dict[str, Any] = part.tracked(value) if part else copy.deepcopy(dict(value))
    return copied


def as_trial_hparams(value: Any) -> Any:
    """Return what :func:`tracked` returned, or a part of it, in the form for a trial's code."""
    part = PARTS.find("hparam_reads")
    return part.as_trial_hparams(value) if part else value


def note_read(path: str) -> None:
    """Record that a hyperparameter, by its dotted path, and everything below it was read."""
    if part := PARTS.find("hparam_reads"):
        part.note_read(path)


def warn_of_unread(spec: "RunSpec") -> None:
    """Warn of searched hyperparameters that this process, whose run succeeded, never read."""
    if part := PARTS.find("hparam_reads"):
        part.warn_of_unread(spec)


def read_unread(run_dir: Path) -> list[str] | None:
    """Return the names of which :func:`warn_of_unread` warned; None before."""
    names = (read_json(RunFolder(run_dir).unread) or {}).get("names")
    return [str(name) for name in names] if isinstance(names, list) else None


def searched_names(space: Any) -> list[str]:
    """Return the dotted names of the hyperparameters that an experiment searches.

    Args:
        space: ``hyperparameters`` of its configuration.
    """
    return [*_searched(space)] if isinstance(space, Mapping) else []


def join(path: str, key: object) -> str:
    """Return the dotted path of a key in a block."""
    return f"{path}.{key}" if path else str(key)


def _searched(space: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the dotted paths of search specs outside of lists."""
    for key, value in space.items():
        if not isinstance(value, Mapping):
            continue
        dotted_path = join(path, key)
        if isinstance(value.get("type"), str):
            if value["type"] in _SEARCHED:
                yield dotted_path
        else:
            yield from _searched(value, dotted_path)
