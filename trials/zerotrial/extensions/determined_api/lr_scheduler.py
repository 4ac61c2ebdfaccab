"""Determined's wrapper of a schedule of the learning rate."""

import enum
from typing import Any

__all__ = ["LRScheduler"]


class LRScheduler:
    """Schedule, and when the training loop steps it.

    Args:
        scheduler: Schedule of torch.
        step_mode: When it steps.
        frequency: Every how many times of the mode.
    """

    class StepMode(enum.Enum):
        """When a schedule steps."""

        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4

    def __init__(self, scheduler: Any, step_mode: StepMode, frequency: int = 1) -> None:
        self._scheduler = scheduler
        self._step_mode = step_mode
        self._frequency = frequency

    def step(self, *args: Any, **options: Any) -> None:
        """Step the schedule."""
        self._scheduler.step(*args, **options)

    def step_if_due(self, batch: int, *, epoch: int | None, updates: int | None) -> None:
        """Step at the end of a batch if the mode says so.

        Args:
            batch: Batches completed.
            epoch: Epochs completed, if the batch was the last one of an epoch.
            updates: Optimizer steps made, if the batch ended with one.
        """
        mode = self.StepMode
        count = {
            mode.STEP_EVERY_BATCH: batch,
            mode.STEP_EVERY_EPOCH: epoch,
            mode.STEP_EVERY_OPTIMIZER_STEP: updates,
            mode.MANUAL_STEP: None,
        }[self._step_mode]
        if count is not None and count % self._frequency == 0:
            self._scheduler.step()

    def get_last_lr(self) -> list[float]:
        """Return the current learning rates."""
        rates: list[float] = self._scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule."""
        state: dict[str, Any] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the schedule."""
        self._scheduler.load_state_dict(state_dict)
