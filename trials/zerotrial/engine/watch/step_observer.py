"""Step observer: progress lines, rates, and breakdowns of time and memory.

Everything is off by default and then costs nothing: the engine gets a
:class:`~zerotrial.engine.protocols.NullObserver`. Rank 0 writes the lines through ``logging``,
under the name of :data:`logger`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zerolab.config.engine.resolved_config import format_entries, ineffective_keys, resolve
from zerolab.formatting import size_text
from zerotrial.engine.protocols import NullObserver, Observer
from zerotrial.engine.watch.breakdown import Breakdown
from zerotrial.engine.watch.flops import (
    ForwardProfile,
    counter,
    format_profile,
    in_units,
    peak_flops,
)
from zerotrial.engine.watch.monitors import Monitored, make_writers
from zerotrial.engine.watch.tensor_memory import tensor_bytes_by_kind

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.protocols import StepResult

logger = logging.getLogger("zerotrial.engine")

DEFAULT_INTERVAL = 10
"""Number of steps between two lines if ``steps_per_print`` is not set."""

_COUNTED = ("forward", "backward")
"""Phases whose operations are counted."""


def make_observer(config: EngineConfig, device: torch.device, rank: int, ranks: int) -> Observer:
    """Return the observer of an engine.

    Args:
        config: Selects the output.
        device: Training device.
        rank: Global rank; only rank 0 measures and writes.
        ranks: Number of ranks.

    Returns:
        A step observer, or a null observer.
    """
    needs_observer = (
        config.steps_per_print is not None
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or config.flops_profiler.enabled
        or config.comms_logger.enabled
    )
    if rank != 0:
        return NullObserver()
    observer: Observer = NullObserver()
    if needs_observer:
        _make_audible()
        observer = StepObserver(config, device, ranks)
    writers = make_writers(config)
    return cast("Observer", Monitored(observer, writers)) if writers else observer


def describe_config(config: EngineConfig, world_size: int, model: nn.Module) -> None:
    """Log the resolved configuration, if requested, and the keys without effect in one line.

    Args:
        config: The engine's configuration.
        world_size: Number of data-parallel ranks.
        model: Model whose size limits the buckets.
    """
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    entries = resolve(config, world_size, numel)
    if config.dump_state:
        _make_audible()
        logger.info("%s, on %d ranks:\n%s", config.source, world_size, format_entries(entries))
    if idle := ineffective_keys(config, entries):
        # A warning, because a plain script does not show lower levels.
        logger.warning(
            "%s: accepted, and without effect here: %s; `zerolab config check` says why",
            config.source,
            ", ".join(idle),
        )


def _make_audible() -> None:
    """Write to standard output unless the program has configured logging."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)


class StepObserver:
    """Observer that writes progress lines.

    Args:
        config: Selects the output.
        device: Device to time.
        ranks: Number of ranks.
    """

    def __init__(self, config: EngineConfig, device: torch.device, ranks: int) -> None:
        # what to show
        self._config = config
        self._interval = config.steps_per_print or DEFAULT_INTERVAL
        self._device = device
        # what is measured
        self._breakdown = Breakdown(device, ranks) if config.wall_clock_breakdown else None
        self._meter = FlopMeter(config)
        self._began: float | None = None
        self._moved: dict[str, int] = {}  # elements by collective, at the last line
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

    @property
    def times_phases(self) -> bool:
        """Whether :meth:`phase` measures anything."""
        return self._breakdown is not None

    def under_way(self, change: int) -> None:
        """Count collectives that start (1) or end (-1)."""
        if self._breakdown is not None:
            self._breakdown.under_way(change)

    def add_loss(self, share: Tensor) -> None:
        """Add a loss divided by the micro-batches of a step; it stays on the device."""
        self._loss += share
        self._has_loss = True

    def attach(self, engine: Engine) -> None:
        """Attach to an engine that has been built.

        Args:
            engine: The observed engine.
        """
        self._engine = engine
        self._meter.attach(engine.module)
        engine.module.register_forward_pre_hook(self._count_tokens, with_kwargs=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, and count its operations if needed.

        Args:
            name: Phase, see :class:`~zerotrial.engine.protocols.Observer`; a forward without
                gradients counts as ``evaluation``.

        Yields:
            Nothing.
        """
        if self._began is None:
            self._began = time.perf_counter()
        with ExitStack() as stack:
            if self._breakdown is not None:
                evaluates = name == "forward" and not torch.is_grad_enabled()
                stack.enter_context(self._breakdown.phase("evaluation" if evaluates else name))
            if name in _COUNTED:
                stack.enter_context(self._meter.phase(name))
            yield

    def step_finished(self, result: StepResult) -> None:
        """Write the lines that are due after an optimizer step."""
        engine = self._engine
        if engine is None:
            return
        self._steps += 1
        self._end_trace()
        self._meter.step_finished(engine)
        if engine.progress.global_steps % self._interval:
            if engine.progress.global_steps == 1 and self._config.memory_breakdown:
                logger.info(memory_line(engine))
            if not self._is_warm:  # the first step warms up: leave it out
                self._restart()
            self._is_warm = True
            return
        self._wait()
        seconds = self._seconds()
        self._measure(engine, seconds)
        logger.info("%s", self._line(engine, result, seconds))
        if self._breakdown is not None:
            logger.info("%s", self._breakdown.line(seconds, self._steps))
            self.measured |= self._breakdown.shares
        if self._config.comms_logger.enabled:
            logger.info("%s", self._communication(engine))
        if self._config.memory_breakdown:
            logger.info("%s", memory_line(engine))
        self._restart()

    def _restart(self) -> None:
        self._wait()
        if self._breakdown is not None:
            self._breakdown.restart()
        self._loss.zero_()
        self._has_loss = False
        if self._engine is not None and self._config.comms_logger.enabled:
            self._moved = dict(self._engine.stage.traffic.elements)
        self._steps = self._tokens = 0
        self._began = time.perf_counter()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _seconds(self) -> float:
        """Return the average seconds of a step since the last line."""
        return (time.perf_counter() - (self._began or 0.0)) / self._steps

    def _measure(self, engine: Engine, seconds: float) -> None:
        self.measured = {"step_seconds": seconds}
        if (momentum := _momentum(engine)) is not None:
            self.measured["momentum"] = momentum
        if not self._config.timers.throughput.enabled:
            return
        self.rates = {"samples_per_second": engine.batch.train / seconds}
        if self._tokens:
            tokens = self._tokens * engine.batch.dp_world_size / self._steps
            self.rates["tokens_per_second"] = tokens / seconds
        if self._meter.flops:
            rate = self._meter.flops / seconds
            self.rates["tflops"] = rate / 1e12
            if peak := peak_flops(self._device, _compute_type(self._config)):
                self.rates["mfu"] = rate / peak
        self.measured |= self.rates

    def _line(self, engine: Engine, result: StepResult, seconds: float) -> str:
        rates = ", ".join(f"{group['lr']:.3g}" for group in engine.optimizer.param_groups)
        parts = [f"loss {self._loss.item() / self._steps:.5g}"] if self._has_loss else []
        parts.append(f"lr {rates}")
        if (momentum := self.measured.get("momentum")) is not None:
            parts.append(f"momentum {momentum:.3g}")
        if result.grad_norm is not None:
            parts.append(f"gradient norm {result.grad_norm:.4g}")
        if self._config.fp16.enabled:
            parts.append(f"loss scale {engine.scaler.scale:g}")
        parts.append(f"skipped {engine.progress.skipped_steps}")
        parts.append(f"{seconds * 1e3:,.1f} ms a step")
        if samples := self.rates.get("samples_per_second"):
            parts.append(f"{samples:,.1f} samples/s")
        if tokens := self.rates.get("tokens_per_second"):
            parts.append(f"{tokens:,.0f} tokens/s")
        if tflops := self.rates.get("tflops"):
            parts.append(f"{in_units(tflops * 1e12)}FLOP/s on each device")
        if mfu := self.rates.get("mfu"):
            parts.append(f"MFU {mfu:.1%}")
        return f"step {engine.progress.global_steps}: {', '.join(parts)}"

    def _communication(self, engine: Engine) -> str:
        """Return this rank's collective traffic per step, averaged since the last line."""
        options = self._config.comms_logger
        counted = dict(engine.stage.traffic.elements)
        parts = []
        for name, elements in counted.items():
            if options.prof_all or name in options.prof_ops:
                moved = (elements - self._moved.get(name, 0)) / self._steps
                parts.append(f"{name} {moved:,.0f}")
        self._moved = counted
        return f"communication of a step, in elements: {', '.join(parts) or 'none'}"

    def close(self) -> None:
        """Release resources; the engine is closed."""
        if self._breakdown is not None:
            self._breakdown.drop_trace()

    def _end_trace(self) -> None:
        if self._breakdown is not None and self._began is not None:
            self._began += self._breakdown.end_trace()

    def _count_tokens(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._tokens += count_tokens(args, kwargs)


def _momentum(engine: Engine) -> float | None:
    """Return the first beta, or the momentum, of the first group; None if there is neither."""
    group = engine.optimizer.param_groups[0]
    if "betas" in group:
        return float(group["betas"][0])
    return float(group["momentum"]) if "momentum" in group else None


class FlopMeter:
    """Counter of the first step's operations, and profiler of the configured step.

    Args:
        config: ``flops_profiler``, and whether rates are printed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._profiler = config.flops_profiler
        # The counter does not see the kernels of compiled blocks.
        rated = config.steps_per_print is not None and config.timers.throughput.enabled
        self._is_counting = rated and not config.compile.enabled
        self._module: nn.Module | None = None
        self._numels: dict[str, int] = {}
        self._steps = 0
        self._profile: ForwardProfile | None = None
        self._counted = {"forward": 0, "backward": 0}
        self._profiled: dict[str, float] = {}
        self.flops = 0
        """Operations of a step on this rank; 0 while unknown. Recomputation by activation
        checkpointing is not counted: it is no progress."""

    def attach(self, module: nn.Module) -> None:
        """Attach to the model."""
        self._module = module
        self._numels = {name: p.numel() for name, p in module.named_parameters()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block if needed.

        Args:
            name: Name of the phase.

        Yields:
            Nothing.
        """
        due = name in self._counted and (name == "backward" or torch.is_grad_enabled())
        profiling = self._profiler.enabled and self._steps + 1 == self._profiler.profile_step
        if due and profiling and f"{name} flops" not in self._profiled:
            mode = self._open_profile(name)
            began = time.perf_counter()
            with mode:
                yield
            self._profiled[f"{name} seconds"] = time.perf_counter() - began
            self._profiled[f"{name} flops"] = _flops_of(mode)
        elif due and self._is_counting and self._steps == 0:
            with counter() as mode:
                yield
            self._counted[name] += mode.get_total_flops()
        else:
            yield

    def _open_profile(self, name: str) -> Any:
        if name != "forward" or self._module is None:
            return counter()
        self._profile = ForwardProfile(self._module, self._numels)
        return self._profile

    def step_finished(self, engine: Engine) -> None:
        """Sum up after the first step; write the table after the profiled one."""
        self._steps += 1
        if self._steps == 1:
            forward, backward = self._counted.values()
            again = self._config.activation_checkpointing.active
            self.flops = 3 * forward if again else forward + backward
        if self._profiler.enabled and self._steps == self._profiler.profile_step:
            self._write(engine)

    def _write(self, engine: Engine) -> None:
        if self._profile is None:
            return
        forward, backward = (self._profiled.get(f"{n} flops", 0.0) for n in self._counted)
        seconds = sum(self._profiled.get(f"{n} seconds", 0.0) for n in self._counted)
        again = forward * self._profiler.recompute_fwd_factor
        title = (
            f"profile of optimizer step {engine.progress.global_steps}, first micro-batch, rank 0: "
            f"{sum(self._numels.values()):,} parameters, forward {in_units(forward)}FLOP, "
            f"backward {in_units(backward + again)}FLOP, {seconds * 1e3:.2f} ms while counting"
        )
        text = format_profile(
            self._profile.costs(),
            title=title,
            module_depth=self._profiler.module_depth,
            top_modules=self._profiler.top_modules,
            detailed=self._profiler.detailed,
        )
        if self._profiler.output_file:
            path = Path(self._profiler.output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        else:
            logger.info("%s", text)


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


def memory_line(engine: Engine) -> str:
    """Return the line about this rank's memory by kind.

    Args:
        engine: Engine to inspect.

    Returns:
        One line.
    """
    parts = [
        f"{kind} {size_text(size)}"
        for kind, size in tensor_bytes_by_kind(engine.stage.tensors_by_kind()).items()
    ]
    parts.append(f"process {size_text(psutil.Process().memory_info().rss)}")
    if engine.device.type == "cuda":
        now, peak = (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        parts.append(f"GPU {size_text(now)}, at most {size_text(peak)}")
    return f"memory at step {engine.progress.global_steps}: {', '.join(parts)}"


def _flops_of(mode: FlopCounterMode | ForwardProfile) -> int:
    return mode.flops if isinstance(mode, ForwardProfile) else mode.get_total_flops()


def _compute_type(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.dtype == "fp32" else torch.bfloat16
