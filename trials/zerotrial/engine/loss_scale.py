"""Loss scaling for fp16, as DeepSpeed's ZeRO optimizers do it, without torch."""

from typing import Any

from zerolab.config.engine.runtime import Fp16Config
from zerolab.errors import ConfigError, EngineError

__all__ = ["DynamicLossScaler", "LossScaleError", "LossScaler", "StaticLossScaler", "make_scaler"]


class LossScaleError(EngineError):
    """Gradients overflow even at the smallest loss scale."""


class StaticLossScaler:
    """A scale that never changes.

    Args:
        scale: The loss is multiplied by it; 1 for bf16 and fp32.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:  # noqa: FBT001 - the name says it
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale of the configuration applies, not that of the checkpoint."""


class DynamicLossScaler:
    """Loss scale that adapts to overflows of fp16 gradients.

    It halves when gradients overflow, and doubles after a window of clean steps.

    Args:
        initial_scale_power: The scale starts at 2 to this power.
        loss_scale_window: Clean optimizer steps after which the scale doubles.
        hysteresis: Overflows in a row of which all but the last are tolerated; at least 1.
        consecutive_hysteresis: A clean step restores the tolerance; otherwise only growth does.
        min_loss_scale: Smallest scale.

    Raises:
        ConfigError: If a number is out of range.

    Example:
        >>> from zerotrial.engine.loss_scale import DynamicLossScaler
        >>> scaler = DynamicLossScaler(initial_scale_power=4, hysteresis=1)
        >>> scaler.scale
        16.0
        >>> scaler.update(overflow=True)
        >>> scaler.scale
        8.0
    """

    def __init__(
        self,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's order
        min_loss_scale: float = 1.0,
    ) -> None:
        problems = []
        if initial_scale_power < 0:
            problems.append(f"fp16.initial_scale_power: must be >= 0, got {initial_scale_power}")
        if loss_scale_window < 1:
            problems.append(f"fp16.loss_scale_window: must be >= 1, got {loss_scale_window}")
        if hysteresis < 1:
            problems.append(f"fp16.hysteresis: must be >= 1, got {hysteresis}")
        if min_loss_scale <= 0:
            problems.append(f"fp16.min_loss_scale: must be > 0, got {min_loss_scale}")
        if problems:
            raise ConfigError("loss scaler", problems)
        self.scale = float(2**initial_scale_power)
        self._window = loss_scale_window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._minimum = float(min_loss_scale)
        self._tolerance = hysteresis
        self._step = 0
        self._last_overflow = -1

    def update(self, overflow: bool) -> None:  # noqa: FBT001 - the name says it
        """Adapt the scale after an optimizer step.

        Args:
            overflow: Whether its gradient was not finite (the step is skipped).

        Raises:
            LossScaleError: If the scale would have to fall below its minimum.

        Example:
            >>> from zerotrial.engine.loss_scale import DynamicLossScaler
            >>> scaler = DynamicLossScaler(initial_scale_power=4, loss_scale_window=2)
            >>> for _ in range(3):
            ...     scaler.update(overflow=False)
            >>> scaler.scale
            32.0
        """
        if overflow:
            self._shrink()
            self._last_overflow = self._step
        else:
            self._grow()
        self._step += 1

    def _shrink(self) -> None:
        # The first steps after a doubling often overflow once. Halving on each would end far below
        # the largest scale that works, where small gradients become zero.
        if self._tolerance > 1:
            self._tolerance -= 1
            return
        if self.scale <= self._minimum:
            msg = (
                f"the gradient is not finite even at the smallest loss scale {self._minimum:g} "
                "(fp16.min_loss_scale); look for an inf or nan in the loss or the data, lower the "
                "learning rate, or train in bf16"
            )
            raise LossScaleError(msg)
        self.scale = max(self.scale / 2, self._minimum)

    def _grow(self) -> None:
        if self._consecutive:
            self._tolerance = self._hysteresis
        clean = self._step - self._last_overflow - 1
        if clean > 0 and clean % self._window == 0:
            self._tolerance = self._hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Returns:
            ``scale`` (float), ``tolerance``, ``step`` and ``last_overflow`` (int).

        Example:
            >>> from zerotrial.engine.loss_scale import DynamicLossScaler
            >>> DynamicLossScaler(initial_scale_power=4).state_dict()["scale"]
            16.0
        """
        return {
            "scale": self.scale,
            "tolerance": self._tolerance,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`.

        Args:
            state: The saved state; only ``scale`` is required.

        Example:
            >>> from zerotrial.engine.loss_scale import DynamicLossScaler
            >>> scaler = DynamicLossScaler()
            >>> scaler.load_state_dict({"scale": 1024.0})
            >>> scaler.scale
            1024.0
        """
        self.scale = float(state["scale"])
        self._tolerance = int(state.get("tolerance", self._hysteresis))
        self._step = int(state.get("step", 0))
        self._last_overflow = int(state.get("last_overflow", -1))


LossScaler = StaticLossScaler | DynamicLossScaler


def make_scaler(config: Fp16Config) -> LossScaler:
    """Make the scaler of the ``fp16`` block; its scale is 1 if the block is disabled."""
    if not config.enabled:
        return StaticLossScaler()
    if config.loss_scale > 0:
        return StaticLossScaler(config.loss_scale)
    return DynamicLossScaler(
        config.initial_scale_power,
        config.loss_scale_window,
        config.hysteresis,
        config.consecutive_hysteresis,
        config.min_loss_scale,
    )
