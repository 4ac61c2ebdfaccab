"""Observer with breakdowns of time and memory, operation counts, and collective traffic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
from torch import nn

from zerolab.formatting import size_text
from zerotrial.engine.builder.config_log import logger, make_audible
from zerotrial.engine.protocols import NullObserver, Observer
from zerotrial.extensions.profiler.breakdown import Breakdown
from zerotrial.extensions.profiler.flops import (
    ForwardProfile,
    counter,
    format_profile,
    in_units,
    peak_flops,
)
from zerotrial.extensions.profiler.monitors import Monitored, make_writers
from zerotrial.extensions.profiler.progress_lines import StepObserver
from zerotrial.extensions.profiler.tensor_memory import tensor_bytes_by_kind
from zerotrial.extensions.profiler.timed_collectives import timed_communicator

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.protocols import StepResult

__all__ = ["ProfilingObserver", "make_observer", "memory_line"]

_COUNTED = ("forward", "backward")
"""Phases whose operations are counted."""


def make_observer(config: EngineConfig, device: torch.device, ranks: int) -> Observer:
    """Return the observer of rank 0."""
    observer: Observer = NullObserver()
    if (
        config.steps_per_print is not None
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or config.flops_profiler.enabled
        or config.comms_logger.enabled
    ):
        make_audible()
        observer = ProfilingObserver(config, device, ranks)
    writers = make_writers(config)
    return cast("Observer", Monitored(observer, writers)) if writers else observer


class ProfilingObserver(StepObserver):
    """Observer that adds FLOP/s to the progress lines, and writes breakdowns after them."""

    def __init__(self, config: EngineConfig, device: torch.device, ranks: int) -> None:
        super().__init__(config, device)
        self._breakdown = Breakdown(device, ranks) if config.wall_clock_breakdown else None
        self._meter = FlopMeter(config)
        self._moved: dict[str, int] = {}  # elements by collective, at the last line

    @property
    def times_phases(self) -> bool:  # type: ignore[override]
        """Whether :meth:`phase` measures anything."""
        return self._breakdown is not None

    def timed(self, comm: Communicator) -> Communicator:
        """Return a communicator whose calls are phases; the same one if nothing is timed."""
        return comm if self._breakdown is None else timed_communicator(comm, self)

    def under_way(self, change: int) -> None:
        """Count collectives that start (1) or end (-1)."""
        if self._breakdown is not None:
            self._breakdown.under_way(change)

    def attach(self, engine: Engine) -> None:
        """Attach to an engine that has been built."""
        super().attach(engine)
        self._meter.attach(engine.module)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, and count its operations if needed.

        Args:
            name: Phase, see :class:`~zerotrial.engine.protocols.Observer`; a forward without
                gradients counts as ``evaluation``.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            stack.enter_context(super().phase(name))
            if self._breakdown is not None:
                evaluates = name == "forward" and not torch.is_grad_enabled()
                stack.enter_context(self._breakdown.phase("evaluation" if evaluates else name))
            if name in _COUNTED:
                stack.enter_context(self._meter.phase(name))
            yield

    def close(self) -> None:
        """Release resources; the engine is closed."""
        if self._breakdown is not None:
            self._breakdown.drop_trace()

    def _observe_step(self, engine: Engine, *, is_due: bool) -> None:
        if self._breakdown is not None and self._began is not None:
            self._began += self._breakdown.end_trace()
        self._meter.step_finished(engine)
        if self._config.memory_breakdown and engine.progress.global_steps == 1 and not is_due:
            logger.info(memory_line(engine))

    def _restart(self) -> None:
        super()._restart()
        if self._breakdown is not None:
            self._breakdown.restart()
        if self._engine is not None and self._config.comms_logger.enabled:
            self._moved = dict(self._engine.stage.traffic.elements)

    def _rates(self, engine: Engine, seconds: float) -> dict[str, float]:
        rates = super()._rates(engine, seconds)
        if self._meter.flops:
            rate = self._meter.flops / seconds
            rates["tflops"] = rate / 1e12
            if peak := peak_flops(self._device, _compute_type(self._config)):
                rates["mfu"] = rate / peak
        return rates

    def _lines(self, engine: Engine, result: StepResult, seconds: float) -> Iterator[str]:
        yield from super()._lines(engine, result, seconds)
        if self._breakdown is not None:
            yield self._breakdown.line(seconds, self._steps)
            self.measured |= self._breakdown.shares
        if self._config.comms_logger.enabled:
            yield self._communication(engine)
        if self._config.memory_breakdown:
            yield memory_line(engine)

    def _parts(self, engine: Engine, result: StepResult, seconds: float) -> Iterator[str]:
        yield from super()._parts(engine, result, seconds)
        if tflops := self.rates.get("tflops"):
            yield f"{in_units(tflops * 1e12)}FLOP/s on each device"
        if mfu := self.rates.get("mfu"):
            yield f"MFU {mfu:.1%}"

    def _communication(self, engine: Engine) -> str:
        """Return this rank's collective traffic per step, averaged since the last line."""
        options = self._config.comms_logger
        counted = dict(engine.stage.traffic.elements)
        parts = []
        for name, elements in counted.items():
            if options.prof_all or name in options.prof_ops:
                moved = (elements - self._moved.get(name, 0)) / self._steps
                parts.append(f"{name} {moved:,.0f}")
        return f"communication of a step, in elements: {', '.join(parts) or 'none'}"


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
        """Count the block if needed."""
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


def memory_line(engine: Engine) -> str:
    """Return the line about this rank's memory by kind.

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
