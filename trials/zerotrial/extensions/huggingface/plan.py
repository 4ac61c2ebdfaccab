"""Actions that the experiment requires of a script: validating, saving and leaving."""

from dataclasses import dataclass

from zerolab.contract.spec import FitSpec, LengthSpec

__all__ = ["Due", "due_at"]


@dataclass(frozen=True)
class Due:
    """Actions due after a batch or an epoch."""

    validate: bool = False
    save: bool = False
    leave: bool = False


def due_at(fit: FitSpec | None, unit: str, count: int) -> Due:
    """Return the actions due at a position of training.

    Args:
        fit: Schedule of the run; None outside an experiment.
        unit: ``batches`` or ``epochs``.
        count: Number of complete ones.
    """
    if fit is None:
        return Due()
    rungs: tuple[int, ...] = ()
    leave = False
    if fit.max_length is not None and fit.max_length.unit == unit:
        rungs = fit.validate_at
        leave = fit.until is not None and fit.until <= count < fit.max_length.count
    validate = leave or count in rungs or _falls_on(fit.validation_period, unit, count)
    return Due(validate, leave or _falls_on(fit.checkpoint_period, unit, count), leave)


def _falls_on(period: LengthSpec | None, unit: str, count: int) -> bool:
    return period is not None and period.unit == unit and count % period.count == 0
