"""Progress lines: loss, rates and time of a step, every ``steps_per_print`` steps.

Off by default, and then without cost. Rank 0 writes the lines through ``logging``, under the name
``zerotrial.engine``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerotrial.engine.builder.config_log import logger
from zerotrial.engine.protocols import Observer

if TYPE_CHECKING:
    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.protocols import StepResult

__all__ = ["StepObserver", "count_tokens"]

DEFAULT_INTERVAL = 10
"""Number of steps between two lines if ``steps_per_print`` is not set."""


class StepObserver(Observer):
    """Observer that writes progress lines."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._config = config
        self._interval = config.steps_per_print or DEFAULT_INTERVAL
        self._device = device
        self._began: float | None = None
        self._steps = 0
        self._is_warm = False
        self._tokens = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._has_loss = False  # a plain loss.backward() reports no loss
        self._engine: Engine | None = None
        self.rates: dict[str, float] = {}
        """Rates of the last line, as far as known: ``samples_per_second``, ``tokens_per_second``,
        ``tflops`` of one device, ``mfu``."""
        self.measured: dict[str, float] = {}
        """All measured values of the last line, including :attr:`rates`."""

    def attach(self, engine: Engine) -> None:
        """Attach to an engine that has been built."""
        self._engine = engine
        engine.module.register_forward_pre_hook(self._count_tokens, with_kwargs=True)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a null context; the first phase starts the clock."""
        if self._began is None:
            self._began = time.perf_counter()
        return super().phase(name)

    def add_loss(self, share: Tensor) -> None:
        """Add a loss divided by the micro-batches of a step; it stays on the device."""
        self._loss += share
        self._has_loss = True

    def step_finished(self, result: StepResult) -> None:
        """Write the lines that are due after an optimizer step."""
        engine = self._engine
        if engine is None:
            return
        self._steps += 1
        is_due = engine.progress.global_steps % self._interval == 0
        self._observe_step(engine, is_due=is_due)
        if is_due:
            self._wait()
            seconds = (time.perf_counter() - (self._began or 0.0)) / self._steps
            self._measure(engine, seconds)
            for line in self._lines(engine, result, seconds):
                logger.info("%s", line)
        if is_due or not self._is_warm:  # the first step warms up: leave it out
            self._restart()
        self._is_warm = True

    def _observe_step(self, engine: Engine, *, is_due: bool) -> None:
        """Measure something at the end of each step."""

    def _restart(self) -> None:
        self._wait()
        self._loss.zero_()
        self._has_loss = False
        self._steps = self._tokens = 0
        self._began = time.perf_counter()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _measure(self, engine: Engine, seconds: float) -> None:
        self.measured = {"step_seconds": seconds}
        if (momentum := _momentum(engine)) is not None:
            self.measured["momentum"] = momentum
        if self._config.timers.throughput.enabled:
            self.rates = self._rates(engine, seconds)
            self.measured |= self.rates

    def _rates(self, engine: Engine, seconds: float) -> dict[str, float]:
        rates = {"samples_per_second": engine.batch.train / seconds}
        if self._tokens:
            tokens = self._tokens * engine.batch.dp_world_size / self._steps
            rates["tokens_per_second"] = tokens / seconds
        return rates

    def _lines(self, engine: Engine, result: StepResult, seconds: float) -> Iterator[str]:
        """Yield the lines of a step that is due."""
        parts = self._parts(engine, result, seconds)
        yield f"step {engine.progress.global_steps}: {', '.join(parts)}"

    def _parts(self, engine: Engine, result: StepResult, seconds: float) -> Iterator[str]:
        if self._has_loss:
            yield f"loss {self._loss.item() / self._steps:.5g}"
        rates = (group["lr"] for group in engine.optimizer.param_groups)
        yield f"lr {', '.join(f'{rate:.3g}' for rate in rates)}"
        if (momentum := self.measured.get("momentum")) is not None:
            yield f"momentum {momentum:.3g}"
        if result.grad_norm is not None:
            yield f"gradient norm {result.grad_norm:.4g}"
        if self._config.fp16.enabled:
            yield f"loss scale {engine.scaler.scale:g}"
        yield f"skipped {engine.progress.skipped_steps}"
        yield f"{seconds * 1e3:,.1f} ms a step"
        if samples := self.rates.get("samples_per_second"):
            yield f"{samples:,.1f} samples/s"
        if tokens := self.rates.get("tokens_per_second"):
            yield f"{tokens:,.0f} tokens/s"

    def _count_tokens(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._tokens += count_tokens(args, kwargs)


def _momentum(engine: Engine) -> float | None:
    """Return the first beta, or the momentum, of the first group; None if there is neither."""
    group = engine.optimizer.param_groups[0]
    if "betas" in group:
        return float(group["betas"][0])
    return float(group["momentum"]) if "momentum" in group else None


def count_tokens(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Estimate the number of tokens of a forward.

    Args:
        args: Arguments of the forward.
        kwargs: Keyword arguments of the forward; ``input_ids`` has priority.

    Returns:
        Elements of the first integer tensor of two or more dimensions, (batch, length); 0 if
        there is none, as for images.
    """
    for value in (kwargs.get("input_ids"), *tree_leaves((args, dict(kwargs)))):
        if isinstance(value, Tensor) and value.dim() >= 2 and not value.is_floating_point():
            return value.numel() if value.dtype != torch.bool else 0
    return 0
