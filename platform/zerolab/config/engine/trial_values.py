"""Hyperparameters of the trial that this process belongs to, for ``"auto"`` in engine files.

They belong to the process and are not an argument: user code reads its engine files with
``initialize(config=...)`` in ``__init__``, before the trial's context knows the engine.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TrialValues", "current_trial_values", "trial_values"]


@dataclass(frozen=True, eq=False)
class TrialValues:
    """Values that replace ``"auto"``."""

    hyperparameters: Mapping[str, Any]
    batches: int | None
    """Maximum length of the trial in optimizer steps."""


_entries: list[TrialValues] = []


@contextlib.contextmanager
def trial_values(hyperparameters: Mapping[str, Any], batches: int | None = None) -> Iterator[None]:
    """Resolve ``"auto"`` in engine files of this process from a trial's hyperparameters.

    Args:
        hyperparameters: The trial's hyperparameters.
        batches: Maximum length of the trial in optimizer steps.
    """
    entry = TrialValues(hyperparameters, batches)
    _entries.append(entry)
    try:
        yield
    finally:
        _entries[:] = [other for other in _entries if other is not entry]


def current_trial_values() -> TrialValues | None:
    """Return the innermost values of :func:`trial_values`; None outside of a trial."""
    return _entries[-1] if _entries else None
