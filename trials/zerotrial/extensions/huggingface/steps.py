"""Number of batches (optimizer steps) that a script with an Accelerator has trained."""

__all__ = ["STEPS", "Steps"]


class Steps:
    """Optimizer steps of a trial, counted where Accelerate takes them."""

    def __init__(self) -> None:
        self.before = 0
        """Steps of earlier runs."""
        self.in_trainer = False
        """Whether a Trainer takes them, whose callback handles preemption."""
        self._taken: dict[int, int] = {}

    def count(self, optimizer: object) -> None:
        """Count a step of an optimizer, or of the engine with the optimizer."""
        self._taken[id(optimizer)] = self._taken.get(id(optimizer), 0) + 1

    @property
    def completed(self) -> int:
        """Return the steps of all runs; with several optimizers, the largest count."""
        return self.before + max(self._taken.values(), default=0)


STEPS = Steps()
"""Of this process."""
