"""How far an engine is: its counters, and the accumulation window between two boundaries.

::

    micro-batch   1   2   3 | 4   5   6 | 7   8        accumulation steps: 3
                            b           b              b: boundary, where weights change
                                          ^^^^^ ended: 2

With ``managed_gradient_accumulation: false`` every ``step()`` is a boundary, whatever number of
backward passes came before it.

The engine owns one :class:`Progress`; a checkpoint saves and loads it. Neither knows the other.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from zerolab.config.engine.batch import BatchSizes

__all__ = ["Progress", "WindowState"]

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


@dataclass(frozen=True)
class WindowState:
    """Where an engine is between two accumulation boundaries; the same on all ranks."""

    ended: int
    """Micro-batches that ``step()`` has ended since the last boundary."""

    backwards: int
    """Backward passes since the last ``step()``."""

    accumulation_steps: int
    loss_scale: float
    """What the gathered gradients are multiplied by."""

    @property
    def is_open(self) -> bool:
        """Whether any gradients wait."""
        return bool(self.ended or self.backwards)

    def ended_at(self, accumulation_steps: int) -> int | None:
        """Return how many micro-batches would be as large a part of a window of another length.

        Args:
            accumulation_steps: Of the other window.

        Returns:
            None if it is no whole number, or if a micro-batch has not been ended.
        """
        if accumulation_steps == self.accumulation_steps:
            return self.ended
        ended, rest = divmod(self.ended * accumulation_steps, self.accumulation_steps)
        return None if rest or self.backwards else ended

    def misfit(self, accumulation_steps: int) -> list[str]:
        """Say why a window of another length cannot go on from here; nothing if it can."""
        if self.ended_at(accumulation_steps) is not None:
            return []
        length = self.accumulation_steps
        if self.backwards:
            wanted, made = f"{length}", "between backward() and step()"
        else:
            wanted = f"a multiple of {length // math.gcd(self.ended, length)}"
            made = f"after {self.ended} of {length} micro-batches of an accumulation window"
        return [
            f"gradient_accumulation_steps: must be {wanted}, got {accumulation_steps}: the "
            f"checkpoint was made {made}; load_optimizer_states=False leaves that window out"
        ]

    def to_dict(self, share_factor: float | None) -> dict[str, Any]:
        """Return what a checkpoint keeps of it.

        Args:
            share_factor: Of the stage.
        """
        return {**asdict(self), "share_factor": share_factor}


class Progress:
    """The counters and the window of one engine; counts, and decides nothing else.

    Args:
        batch: Says how many micro-batches make a window.
        managed: False: every ``step()`` ends a window, of as many micro-batches as had a backward.
    """

    def __init__(self, batch: BatchSizes, *, managed: bool = True) -> None:
        self.batch = batch
        self.managed = managed
        # counters
        self.global_steps = 0
        """Accumulation boundaries passed, skipped steps included."""
        self.micro_steps = 0
        """Micro-batches that ``step()`` has ended."""
        self.skipped_steps = 0
        """Boundaries whose gradient was not finite."""
        self.global_samples = 0
        """Samples of all boundaries passed, over all ranks."""
        # the window
        self.ended = 0
        """Micro-batches that ``step()`` has ended since the last boundary."""
        self.backwards = 0
        """Backward passes since the last ``step()``."""
        self.broken = False
        """Inside a backward pass, or after one that raised."""
        self._origin = 0  # micro-batches at a boundary from which windows are counted
        self.boundary_by_hand: bool | None = None
        """What the user has said of the next ``step()``; None: it is counted."""

    @property
    def at_boundary(self) -> bool:
        """Whether the next ``step()`` updates the weights."""
        if self.boundary_by_hand is not None:
            return self.boundary_by_hand
        if not self.managed:
            return True
        return (self.micro_steps - self._origin + 1) % self.batch.accumulation_steps == 0

    @property
    def at_last_backward(self) -> bool:
        """Whether gradients may travel with the next backward, as no other should come after it.

        Where another comes all the same, what has travelled is kept, and added to.
        """
        if self.managed:
            return self.at_boundary
        return self.backwards + 1 >= self.batch.accumulation_steps

    @property
    def waiting(self) -> int:
        """Micro-batches whose gradients wait for the next boundary."""
        return self.ended + self._open_micro_batches

    @property
    def _open_micro_batches(self) -> int:
        """Those since the last ``step()``; managed, all its backward passes are one."""
        return min(self.backwards, 1) if self.managed else self.backwards

    def end_micro_batch(self) -> None:
        """Count one ``step()``."""
        self.micro_steps += self._open_micro_batches
        self.ended += self._open_micro_batches
        self.backwards = 0

    def pass_boundary(self, *, updated: bool) -> None:
        """Count one optimizer step, or one that was skipped."""
        trained = self.batch.accumulation_steps if self.managed else self.ended
        self.ended = 0
        self.global_steps += 1
        self.global_samples += trained * self.batch.micro * self.batch.dp_world_size
        self.skipped_steps += not updated

    def resize(self, batch: BatchSizes) -> None:
        """Count windows of another length from here, which must be a boundary."""
        self.batch = batch
        self._origin = self.micro_steps

    def forget_backwards(self) -> None:
        """Count no backward pass since the last ``step()``."""
        self.backwards, self.broken = 0, False

    def return_to_boundary(self) -> None:
        """Count as if nothing had come since the last boundary."""
        self.forget_backwards()
        self.micro_steps -= self.ended
        self.ended = 0

    def counters(self) -> dict[str, int]:
        """Return the counters by name."""
        return {name: getattr(self, name) for name in _COUNTERS}

    # -- checkpoints ----------------------------------------------------------------------------

    def window(self, loss_scale: float) -> WindowState:
        """Return where the window is.

        Args:
            loss_scale: Of the gradients that wait.
        """
        return WindowState(self.ended, self.backwards, self.batch.accumulation_steps, loss_scale)

    def resume_window(self, state: WindowState) -> None:
        """Go on where a checkpoint was; :meth:`load_state_dict` has brought its last boundary."""
        ended = state.ended_at(self.batch.accumulation_steps)
        assert ended is not None
        self.micro_steps += ended
        self.ended, self.backwards = ended, state.backwards

    def state_dict(self) -> dict[str, int]:
        """Return the counters as they were at the last boundary."""
        return {
            **self.counters(),
            "micro_steps": self.micro_steps - self.ended,
            "accumulation_steps": self.batch.accumulation_steps,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Count on from :meth:`state_dict`."""
        counters = dict(state_dict)
        other = counters.pop("accumulation_steps") != self.batch.accumulation_steps
        if other and self.managed:
            # Boundaries are where micro_steps is a multiple of the accumulation steps, which may
            # be others now.
            counters["micro_steps"] = counters["global_steps"] * self.batch.accumulation_steps
        for name in _COUNTERS:
            setattr(self, name, counters[name])
        self._origin = self.micro_steps
