"""Measurement inside the ranks of a run: profile of the model, or durations of optimizer steps."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist

from zerolab.config.engine.reader import load_engine_config
from zerolab.errors import ConfigError
from zerotrial.engine.builder.environment import ENV_AUTOTUNE, choose_device
from zerotrial.extensions.autotune.candidates import Candidate, Layout, LayoutEstimate, Profile
from zerotrial.extensions.autotune.exchange import Measurement, Request, RunFiles
from zerotrial.extensions.planner.model_profile import ModelProfile, profile_model
from zerotrial.extensions.planner.plan import estimates, find_devices

if TYPE_CHECKING:
    from torch import nn

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.protocols import Observer, StepResult

__all__ = ["MeasuredRun", "begin_measurement"]

_CPU_SHARE = 0.9
"""Share of the available memory of a machine that the ranks may use on CPUs."""

_RUNNING, _COMPLETE, _SLOW = range(3)
"""Status of a measurement."""

_started: list[MeasuredRun] = []
"""The measurement of this process's first engine."""


def begin_measurement(
    model: nn.Module, config: EngineConfig, optimizer: Any, model_parameters: Any
) -> MeasuredRun:
    """Profile the model and end the process, or begin to measure a candidate.

    Args:
        model: Model of an engine that is about to be built.
        config: Its configuration.
        optimizer: Optimizer or function, as for ``initialize``.
        model_parameters: Parameters or groups, as for ``initialize``.

    Raises:
        ConfigError: If the configuration is not that of the candidate.
    """
    files = RunFiles(Path(os.environ[ENV_AUTOTUNE]))
    request = files.read_request()
    if request.candidate is None:
        if _rank() == 0:
            profile = profile_model(model, config, optimizer, model_parameters)
            files.write_profile(_profile(profile, _model_bytes(model)))
        _end()
    if request.override_engine:
        content = config.model_dump(mode="json", exclude_unset=True)
        config = load_engine_config(content, request.overrides)
    run = MeasuredRun(files, request, config, is_first=not _started)
    _started.append(run)
    run.check()
    run.limit_memory()
    return run


class MeasuredRun:
    """Measurement of one engine.

    Args:
        files: Files of the run.
        request: What to measure.
        config: Configuration of the engine, with the candidate's values.
        is_first: Whether it is the first engine of this process; others are not measured.
    """

    def __init__(
        self, files: RunFiles, request: Request, config: EngineConfig, *, is_first: bool
    ) -> None:
        self.files = files
        self.request = request
        self.config = config
        self._is_first = is_first

    def check(self) -> None:
        """Compare the engine's configuration with the candidate.

        Raises:
            ConfigError: If they differ.
        """
        candidate = self.request.candidate
        assert candidate is not None
        problem = _difference(self.config, candidate)
        if problem:
            self.files.write_measurement(_rank(), Measurement(mismatch=problem))
            raise ConfigError(self.config.source, [problem])

    def limit_memory(self) -> None:
        """Limit the memory of this rank: of the process on a CPU, else of the GPU."""
        limit = self.request.memory_bytes
        if limit is None:
            return
        if torch.cuda.is_available():
            device = choose_device(None)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
        elif sys.platform == "linux":  # elsewhere the kernel ignores or refuses it
            _, highest = resource.getrlimit(resource.RLIMIT_DATA)
            if highest == resource.RLIM_INFINITY or limit < highest:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, highest))

    def observe(self, observer: Observer, device: torch.device) -> Observer:
        """Return an observer that measures steps, and passes everything on.

        Args:
            observer: Observer of the engine.
            device: Training device.
        """
        if not self._is_first:
            return observer
        return cast("Observer", _StepTimer(observer, self.files, self.request, device))


class _StepTimer:
    """Observer that records the duration of optimizer steps, and ends the process after them."""

    def __init__(
        self, inner: Observer, files: RunFiles, request: Request, device: torch.device
    ) -> None:
        self._inner = inner
        self._files = files
        self._request = request
        self._device = device
        self._finished = 0
        self._seconds: list[float] = []
        self._rows: int | None = None
        self._began = 0.0
        self._clock = time.process_time if request.clock == "cpu" else time.perf_counter

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner observer."""
        return getattr(self._inner, name)

    def attach(self, engine: Engine) -> None:
        """Attach to an engine that has been built."""
        engine.module.register_forward_pre_hook(self._record_rows, with_kwargs=True)
        self._inner.attach(engine)

    def step_finished(self, result: StepResult) -> None:
        """Record the step's duration; end the process after the last one."""
        self._inner.step_finished(result)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._finished += 1
        if self._finished > self._request.warmup:
            self._seconds.append(self._clock() - self._began)
            status = self._decide()
            self._write(status)
            if status != _RUNNING:
                if dist.is_initialized():
                    dist.barrier()  # the others may still read from this rank
                _end()
        self._began = self._clock()

    def _decide(self) -> int:
        """Return whether to continue, as rank 0 decides. **Collective**."""
        request, seconds = self._request, self._seconds
        status = _RUNNING
        if len(seconds) >= 20 * request.steps or (
            len(seconds) >= request.steps and sum(seconds) >= request.seconds
        ):
            status = _COMPLETE
        elif request.limit_s is not None and len(seconds) >= 2 and min(seconds) > request.limit_s:
            status = _SLOW
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return status
        flag = torch.tensor([status], device=self._device)
        dist.broadcast(flag, src=0)
        return int(flag.item())

    def _write(self, status: int) -> None:
        self._files.write_measurement(
            _rank(),
            Measurement(
                tuple(self._seconds),
                _peak_memory(self._device),
                self._rows,
                complete=status == _COMPLETE,
                slow=status == _SLOW,
            ),
        )

    def _record_rows(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record the first dimension of the first tensor, which usually is the micro-batch."""
        if self._rows is None and torch.is_grad_enabled():
            tensors = (value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
            first = next((tensor for tensor in tensors if tensor.dim()), None)
            self._rows = None if first is None else first.shape[0]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _end() -> NoReturn:
    """End this process without the handlers of the user's code, which might save a model."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _difference(config: EngineConfig, candidate: Candidate) -> str | None:
    """Return the first key whose value is not that of the candidate."""
    zero, layout = config.zero_optimization, candidate.layout
    pairs = {
        "train_micro_batch_size_per_gpu": (
            config.train_micro_batch_size_per_gpu,
            candidate.micro_batch,
        ),
        "gradient_accumulation_steps": (
            config.gradient_accumulation_steps,
            candidate.accumulation_steps,
        ),
        "zero_optimization.stage": (zero.stage, layout.stage),
        "zero_optimization.offload_optimizer.device": (
            zero.offload_optimizer.device,
            layout.offload_optimizer,
        ),
        "zero_optimization.offload_param.device": (
            zero.offload_param.device,
            layout.offload_param,
        ),
        "activation_checkpointing.enabled": (
            config.activation_checkpointing.active,
            candidate.checkpointing,
        ),
    }
    for key, (actual, requested) in pairs.items():
        if actual != requested:
            return f"{key}: must be {requested}, as the candidate says, got {actual}"
    return None


def _profile(model: ModelProfile, model_bytes: int) -> Profile:
    """Estimate the memory of every layout that differs from others on this machine."""
    config = model.config
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data_ranks = max(1, ranks // model.model_ranks)
    batch = config.batch_sizes(data_ranks)
    zero = config.zero_optimization
    path = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
    devices = find_devices(ranks, Path(path) if path else Path.cwd())
    on_cpu = devices.kind == "cpu"
    # The process has more than the model: modules, and what the script has loaded.
    other_bytes = max(0, _data_bytes() - model_bytes) if on_cpu else 0
    layouts = []
    for choice in estimates(model, ranks, devices.kind):
        places = {choice.offload_optimizer, choice.offload_param}
        if (on_cpu and "cpu" in places) or ("nvme" in places and not path):
            continue  # the same memory, or no directory for files
        layout = Layout(choice.stage, choice.offload_optimizer, choice.offload_param)
        device = choice.peak_device + other_bytes + (choice.peak_host if on_cpu else 0)
        layouts.append(LayoutEstimate(layout, device, 0 if on_cpu else choice.peak_host))
    device_bytes = devices.device_bytes
    if on_cpu:
        share = int(_CPU_SHARE * (_available_bytes() / ranks + _data_bytes()))
        device_bytes = min([share, *_process_limits()])
    return Profile(
        parameters=model.parameters,
        largest_block=model.largest_block,
        data_ranks=data_ranks,
        train_batch=batch.train,
        checkpointing=config.activation_checkpointing.active,
        device=devices.kind,
        device_bytes=device_bytes,
        host_bytes=devices.host_bytes,
        layouts=tuple(layouts),
    )


def _model_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)


def _available_bytes() -> int:
    """Return the memory that this machine or its container has left."""
    import psutil

    available: int = psutil.virtual_memory().available
    for folder, limit_name, usage_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = Path(folder, limit_name).read_text().strip()
            usage = Path(folder, usage_name).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():  # "max" without a limit
            available = min(available, max(0, int(limit) - int(usage)))
    return available


def _process_limits() -> list[int]:
    """Return the limits of a process's memory that are set, such as by ``ulimit -v``."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return [limit for limit in limits if limit != resource.RLIM_INFINITY]


def _status_bytes(name: str) -> int:
    """Return a field of ``/proc/self/status``, bytes; 0 where there is none."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((1024 * int(words[1]) for words in lines if words[0] == f"{name}:"), 0)


def _data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA limits."""
    return _status_bytes("VmData")


def _peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank: of the GPU, or resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # ru_maxrss of a forked process includes its parent's peak.
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
