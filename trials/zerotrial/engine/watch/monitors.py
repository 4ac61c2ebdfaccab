"""DeepSpeed's monitors: what an engine writes for TensorBoard, and into CSV files.

Of every optimizer step, over the samples trained so far: ``Train/Samples/lr``,
``Train/Samples/grad_norm``, and ``Train/Samples/loss_scale`` in fp16.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from zerolab.config.engine.engine_config import EngineConfig
    from zerolab.config.engine.runtime import MonitorConfig
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.seams import Observer, StepResult

__all__ = ["Monitored", "make_monitors"]


class Monitor(Protocol):
    """Something that numbers are written to."""

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """Write what is known after so many samples."""
        ...

    def close(self) -> None:
        """Write nothing more."""
        ...


class TensorBoardMonitor:
    """Events for TensorBoard, in ``<output_path>/<job_name>``.

    Args:
        config: Names the directory; without a path it is ``runs`` in the working directory.
    """

    def __init__(self, config: MonitorConfig) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(_directory(config, "runs")))

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """See :class:`Monitor`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        """See :class:`Monitor`."""
        self._writer.close()


class CsvMonitor:
    """A file for each number, with a row for each step, in ``<output_path>/<job_name>``.

    Args:
        config: Names the directory; without a path it is ``csv_monitor`` in the working directory.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._directory = _directory(config, "csv_monitor")
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(self, values: Mapping[str, float], samples: int) -> None:
        """See :class:`Monitor`."""
        for name, value in values.items():
            path = self._directory / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """See :class:`Monitor`."""


def _directory(config: MonitorConfig, default: str) -> Path:
    return Path(config.output_path or default) / config.job_name


def make_monitors(config: EngineConfig) -> list[Monitor]:
    """Make what the file turns on.

    Args:
        config: ``tensorboard`` and ``csv_monitor`` of it are read.
    """
    monitors: list[Monitor] = []
    if config.tensorboard.enabled:
        monitors.append(TensorBoardMonitor(config.tensorboard))
    if config.csv_monitor.enabled:
        monitors.append(CsvMonitor(config.csv_monitor))
    return monitors


class Monitored:
    """The :class:`~zerotrial.engine.seams.Observer` that writes to monitors, too.

    Args:
        inner: Is told everything.
        monitors: Get the numbers of each step.
    """

    def __init__(self, inner: Observer, monitors: list[Monitor]) -> None:
        self._inner = inner
        self._monitors = monitors
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        self._engine = engine
        self._inner.attach(engine)

    @property
    def times_phases(self) -> bool:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        return self._inner.times_phases

    @property
    def measured(self) -> Mapping[str, float]:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        return self._inner.measured

    def under_way(self, change: int) -> None:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        self._inner.under_way(change)

    def add_loss(self, share: Tensor) -> None:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        self._inner.add_loss(share)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        return self._inner.phase(name)

    def step_finished(self, result: StepResult) -> None:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        self._inner.step_finished(result)
        engine = self._engine
        if engine is None:
            return
        values = {"Train/Samples/lr": engine.get_lr()[0]}
        if result.grad_norm is not None and math.isfinite(result.grad_norm):
            values["Train/Samples/grad_norm"] = result.grad_norm
        if engine.fp16_enabled():
            values["Train/Samples/loss_scale"] = engine.loss_scale
        for monitor in self._monitors:
            monitor.write(values, engine.global_samples)

    def close(self) -> None:
        """See :class:`~zerotrial.engine.seams.Observer`."""
        self._inner.close()
        for monitor in self._monitors:
            monitor.close()
