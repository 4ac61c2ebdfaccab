"""Access to ``parameter.grad`` between ``backward`` and ``step``."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zerolab.errors import EngineError
from zerotrial.engine.comm.call_record import CallRecord
from zerotrial.engine.comm.communicator import PeerError
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.module.gradient_access import GRADIENT_ALTERNATIVES
from zerotrial.engine.protocols import ReadableGradients

__all__ = ["EngineGradients"]


class EngineGradients:
    """Gradients of one engine's parameters, a ``GradientOwner``.

    Args:
        stage: ReadableGradients with the gradients.
        scaler: Gradients are multiplied by its scale until the step.
        watchdog: Records reads as collective calls.
    """

    def __init__(self, stage: ReadableGradients, scaler: LossScaler, watchdog: CallRecord) -> None:
        self.stage = stage
        self._scaler = scaler
        self._call = watchdog.call("reading p.grad")

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Return whether the engine manages the gradient of a parameter."""
        return self.stage.owns_gradient(parameter)

    @property
    def gradients_readable(self) -> bool:
        """Whether ``parameter.grad`` can be read between ``backward`` and ``step``."""
        return self.stage.gradients_readable and self._scaler.scale == 1

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return ``parameter.grad`` between ``backward`` and ``step``.

        Users read ``parameter.grad``. **Collective** at stages 1 and 2 on several ranks, and at
        stage 0 between micro-batches.

        Returns:
            The sum over the micro-batches so far, averaged over the ranks. In-place writes take
            effect.

        Raises:
            EngineError: At stage 3, and in fp16 while losses are multiplied by a loss scale.
        """
        self._check_unscaled()
        with self._access():
            return self.stage.read_gradient(parameter)

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Replace the gradient of a parameter; None excludes it from the step.

        Raises:
            EngineError: Like :meth:`read_gradient` unless the value is None; for a wrong shape.
        """
        if value is not None:
            self._check_unscaled()
        if value is not None and not isinstance(value, Tensor):
            msg = f"p.grad: must be a tensor or None, got {type(value).__name__}"
            raise TypeError(msg)
        if value is not None and value.shape != parameter.shape:
            shapes = f"{tuple(parameter.shape)}, got {tuple(value.shape)}"
            raise EngineError(f"p.grad: must have the parameter's shape {shapes}")
        with self._access():
            self.stage.write_gradient(parameter, value)

    @contextmanager
    def _access(self) -> Iterator[None]:
        """Record ``p.grad`` as a collective call, and explain ranks that do not make it."""
        if not self.stage.gathers_gradients:
            yield
            return
        with self._call:
            try:
                yield
            except PeerError as error:
                msg = "p.grad: its first access after backward() is a call that every rank must "
                msg += f"make (no `if rank == 0`); read it on all ranks: {error}"
                raise EngineError(msg) from error

    def _check_unscaled(self) -> None:
        if self._scaler.scale != 1:
            msg = "p.grad: in fp16 gradients are multiplied by the loss scale until step(); "
            raise EngineError(f"{msg}{GRADIENT_ALTERNATIVES}")
