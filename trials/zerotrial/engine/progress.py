"""Progress of an engine: its counters, and the accumulation window between two boundaries.

::

    micro-batch   1   2   3 | 4   5   6 | 7   8        accumulation steps: 3
                            b           b              b: boundary, where weights change
                                          ^^^^^ ended: 2

With ``managed_gradient_accumulation: false`` every ``step()`` is a boundary, regardless of the
number of backward passes before it.

The engine owns one :class:`Progress`, which a checkpoint saves and loads.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.config.engine.batch import BatchSizes

__all__ = ["Progress", "WindowState"]

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


@dataclass(frozen=True)
class WindowState:
    """Position between two accumulation boundaries; equal on all ranks."""

    ended: int
    """Micro-batches that ``step()`` has completed since the last boundary."""

    backwards: int
    """Backward passes since the last ``step()``."""

    accumulation_steps: int
    loss_scale: float
    """Factor of the accumulated gradients."""

    @property
    def is_open(self) -> bool:
        """Whether there are accumulated gradients."""
        return bool(self.ended or self.backwards)

    def ended_at(self, accumulation_steps: int) -> int | None:
        """Return the number of micro-batches that is an equal share of another window length.

        Args:
            accumulation_steps: Length of the other window.

        Returns:
            None if the number is fractional, or if a micro-batch is not completed.
        """
        if accumulation_steps == self.accumulation_steps:
            return self.ended
        ended, remainder = divmod(self.ended * accumulation_steps, self.accumulation_steps)
        return None if remainder or self.backwards else ended

    def resume_problems(self, accumulation_steps: int) -> list[str]:
        """Return the problems of resuming with another window length; empty if it is possible."""
        if self.ended_at(accumulation_steps) is not None:
            return []
        length = self.accumulation_steps
        if self.backwards:
            expected, position = f"{length}", "between backward() and step()"
        else:
            expected = f"a multiple of {length // math.gcd(self.ended, length)}"
            position = f"after {self.ended} of {length} micro-batches of an accumulation window"
        return [
            f"gradient_accumulation_steps: must be {expected}, got {accumulation_steps}: the "
            f"checkpoint was made {position}; load_optimizer_states=False skips the "
            "accumulated gradients"
        ]

    def to_dict(self, local_to_average: float | None) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Args:
            local_to_average: Factor from unreduced gradients to averages.
        """
        return {**asdict(self), "share_factor": local_to_average}


class Progress:
    """Counters and accumulation window of one engine: ``engine.progress``.

    Args:
        batch: Batch sizes, with the number of micro-batches per window.
        managed: False: every ``step()`` ends a window of all micro-batches with a backward.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
        >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
        >>> loss = engine.backward(engine(torch.ones(2, 4)).mean())
        >>> result = engine.step()
        >>> engine.progress.global_steps, engine.progress.global_samples
        (1, 2)
    """

    def __init__(self, batch: BatchSizes, *, managed: bool = True) -> None:
        self.batch = batch
        self.managed = managed
        # counters
        self.global_steps = 0
        """Accumulation boundaries passed, skipped steps included."""
        self.micro_steps = 0
        """Micro-batches that ``step()`` has completed."""
        self.skipped_steps = 0
        """Boundaries whose gradient was not finite."""
        self.global_samples = 0
        """Samples of all boundaries passed, over all ranks."""
        # the last step
        self.updated = False
        """Whether the last ``step()`` changed the weights."""
        self.grad_norm: float | None = None
        """L2 norm of the full averaged gradient at the last update, before clipping."""
        # the window
        self.ended = 0
        """Micro-batches that ``step()`` has completed since the last boundary."""
        self.backwards = 0
        """Backward passes since the last ``step()``."""
        self.broken = False
        """Whether a backward pass is in progress, or has raised."""
        self._origin = 0  # micro-batches at a boundary from which windows are counted
        self.manual_boundary: bool | None = None
        """Boundary at the next ``step()``, set by the user; None: by counting."""

    @property
    def at_boundary(self) -> bool:
        """Whether the next ``step()`` updates the weights."""
        if self.manual_boundary is not None:
            return self.manual_boundary
        if not self.managed:
            return True
        return (self.micro_steps - self._origin + 1) % self.batch.accumulation_steps == 0

    @property
    def at_last_backward(self) -> bool:
        """Whether the next backward is the last one of the window.

        It may then communicate gradients. If another one follows nevertheless, the communicated
        gradients are kept and added to.
        """
        if self.managed:
            return self.at_boundary
        return self.backwards + 1 >= self.batch.accumulation_steps

    @property
    def waiting(self) -> int:
        """Number of micro-batches with gradients that wait for the next boundary."""
        return self.ended + self._open_micro_batches

    @property
    def _open_micro_batches(self) -> int:
        """Micro-batches since the last ``step()``; if managed, all backward passes are one."""
        return min(self.backwards, 1) if self.managed else self.backwards

    def end_micro_batch(self) -> None:
        """Count the micro-batch of one ``step()``."""
        self.micro_steps += self._open_micro_batches
        self.ended += self._open_micro_batches
        self.backwards = 0
        self.updated = False

    def pass_boundary(self, grad_norm: float, *, updated: bool) -> None:
        """Count one optimizer step, applied or skipped.

        Args:
            grad_norm: Norm of its gradient.
            updated: Whether it changed the weights.
        """
        self.updated = updated
        if updated:
            self.grad_norm = grad_norm
        trained = self.batch.accumulation_steps if self.managed else self.ended
        self.ended = 0
        self.global_steps += 1
        self.global_samples += trained * self.batch.micro * self.batch.dp_world_size
        self.skipped_steps += not updated

    def resize(self, batch: BatchSizes) -> None:
        """Change the window length; only at a boundary."""
        self.batch = batch
        self._origin = self.micro_steps

    def reset_backwards(self) -> None:
        """Reset the backward passes since the last ``step()``."""
        self.backwards, self.broken = 0, False

    def return_to_boundary(self) -> None:
        """Reset the counters to the last boundary."""
        self.reset_backwards()
        self.micro_steps -= self.ended
        self.ended = 0

    def counters(self) -> dict[str, int]:
        """Return the counters of the engine as a dict.

        Returns:
            ``global_steps``, ``micro_steps``, ``skipped_steps`` and ``global_samples`` (int).

        Example:
            >>> config = {"train_batch_size": 2}
            >>> engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> engine.progress.counters()
            {'global_steps': 0, 'micro_steps': 0, 'skipped_steps': 0, 'global_samples': 0}
        """
        return {name: getattr(self, name) for name in _COUNTERS}

    # -- checkpoints ----------------------------------------------------------------------------

    def window(self, loss_scale: float) -> WindowState:
        """Return the position in the window.

        Args:
            loss_scale: Factor of the accumulated gradients.
        """
        return WindowState(self.ended, self.backwards, self.batch.accumulation_steps, loss_scale)

    def resume_window(self, state: WindowState) -> None:
        """Resume a window; :meth:`load_state_dict` has restored its last boundary."""
        ended = state.ended_at(self.batch.accumulation_steps)
        assert ended is not None
        self.micro_steps += ended
        self.ended, self.backwards = ended, state.backwards

    def state_dict(self) -> dict[str, int]:
        """Return the counters at the last boundary."""
        return {
            **self.counters(),
            "micro_steps": self.micro_steps - self.ended,
            "accumulation_steps": self.batch.accumulation_steps,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        counters = dict(state_dict)
        other = counters.pop("accumulation_steps") != self.batch.accumulation_steps
        if other and self.managed:
            # Boundaries are multiples of the accumulation steps, which may have changed, so
            # the micro-batches are recounted.
            counters["micro_steps"] = counters["global_steps"] * self.batch.accumulation_steps
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._origin = self.micro_steps
