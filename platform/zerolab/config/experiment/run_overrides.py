"""Overrides that a run applies to the engine files of its ranks."""

import contextlib
from collections.abc import Iterator

from zerolab.config.engine.batch import keep_planned_batch
from zerolab.config.engine.trial_values import trial_values
from zerolab.contract.spec import RunSpec

__all__ = ["apply_run_overrides"]


@contextlib.contextmanager
def apply_run_overrides(spec: RunSpec) -> Iterator[None]:
    """Make engines of this process use a trial's hyperparameters and keep its batch.

    Args:
        spec: The run of this process.
    """
    with (
        trial_values(spec.hparams, spec.max_batches),
        keep_planned_batch(spec.planned_slots or spec.slots, spec.slots),
    ):
        yield
