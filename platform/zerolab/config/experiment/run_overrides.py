"""What a run determines of the engine files that its ranks read."""

import contextlib
from collections.abc import Iterator

from zerolab.config.engine.auto_values import determined_by
from zerolab.config.engine.batch import keeping_batch_of
from zerolab.contract.spec import RunSpec

__all__ = ["determined_by_run"]


@contextlib.contextmanager
def determined_by_run(spec: RunSpec) -> Iterator[None]:
    """Have engines in this process find a trial's hyperparameters, and keep its batch.

    Args:
        spec: Of the run that this process belongs to.
    """
    with (
        determined_by(spec.hparams, spec.max_batches),
        keeping_batch_of(spec.planned_slots or spec.slots, spec.slots),
    ):
        yield
