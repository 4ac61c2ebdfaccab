"""Accelerate's tracker ``zerolab``, which records logged values as metrics of the trial."""

from typing import Any

from accelerate.tracking import GeneralTracker

from zerolab.core.context import Context
from zerotrial.extensions.huggingface.run import join
from zerotrial.extensions.huggingface.steps import STEPS

__all__ = ["ZerolabTracker"]

_VALIDATION = ("eval", "val", "test")
"""Names that begin so are of a validation; so is the searcher's metric, whatever its name."""


class ZerolabTracker(GeneralTracker):  # type: ignore[misc]  # accelerate has no types here
    """Records what ``accelerator.log`` is given.

    ``accelerator.log(values, step=n)`` makes training metrics, and validation metrics of those
    whose names begin with ``eval``, ``val`` or ``test``, and of the searcher's own.

    Args:
        run_name: The project's name, as ``init_trackers`` is given it; the experiment has its own.
    """

    name = "zerolab"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run_name: str = "", **unused: Any) -> None:
        del run_name, unused
        super().__init__()

    @property
    def tracker(self) -> Context:
        """The Core API's context of this run."""
        return join()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing: the experiment has its hyperparameters."""

    def log(self, values: dict[str, Any], step: int | None = None, **unused: Any) -> None:
        """Record numbers; other values are ignored.

        Args:
            values: Values by name.
            step: Batches completed; the optimizer's count if None.
            **unused: Options of other trackers.
        """
        del unused
        context = join()
        metric = context.info.fit.metric if context.info.fit is not None else None
        at = STEPS.completed if step is None else int(step)
        validation = {
            name: value
            for name, value in values.items()
            if name == metric or name.lower().startswith(_VALIDATION)
        }
        training = {name: value for name, value in values.items() if name not in validation}
        if training:
            context.train.report_training_metrics(at, training)
        if validation:
            context.train.report_validation_metrics(at, validation)
        fit = context.info.fit
        if fit is not None and fit.max_length is not None and fit.max_length.unit == "batches":
            context.train.report_progress(at / fit.max_length.count)
