"""DeepSpeed's monitors ``tensorboard`` and ``csv_monitor``.

Each optimizer step writes ``Train/Samples/lr``, ``Train/Samples/grad_norm`` and, in fp16,
``Train/Samples/loss_scale``, over the number of samples trained so far.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.engine import Engine
    from zerotrial.engine.protocols import Observer, StepResult

__all__ = ["CsvWriter", "Monitored", "make_writers"]


class CsvWriter:
    """Writer of one CSV file per name, with the methods of ``SummaryWriter`` that are used here.

    Args:
        directory: Created if it is missing; rows are appended to its files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def add_scalar(self, name: str, value: float, samples: int) -> None:
        """Append a row to the file of a name."""
        path = self._directory / f"{name.replace('/', '_')}.csv"
        is_new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if is_new:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([samples, value])

    def flush(self) -> None:
        """Do nothing: each row is written at once."""

    def close(self) -> None:
        """Do nothing: no file stays open."""


def make_writers(config: EngineConfig) -> list[SummaryWriter | CsvWriter]:
    """Make the writers that ``tensorboard`` and ``csv_monitor`` enable.

    They write to ``<output_path>/<job_name>``. The default path is ``runs`` for TensorBoard and
    ``csv_monitor`` for CSV files, in the working directory.
    """
    writers: list[SummaryWriter | CsvWriter] = []
    if (tensorboard := config.tensorboard).enabled:
        from torch.utils.tensorboard import SummaryWriter

        directory = Path(tensorboard.output_path or "runs") / tensorboard.job_name
        writers.append(SummaryWriter(str(directory)))
    if (table := config.csv_monitor).enabled:
        writers.append(CsvWriter(Path(table.output_path or "csv_monitor") / table.job_name))
    return writers


class Monitored:
    """Observer that passes everything on, and writes the numbers of each step.

    Args:
        inner: Observer that gets every call.
        writers: Writers that get the numbers.
    """

    def __init__(self, inner: Observer, writers: list[SummaryWriter | CsvWriter]) -> None:
        self._inner = inner
        self._writers = writers
        self._engine: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner observer."""
        return getattr(self._inner, name)

    def attach(self, engine: Engine) -> None:
        """Attach to an engine that has been built."""
        self._engine = engine
        self._inner.attach(engine)

    def step_finished(self, result: StepResult) -> None:
        """Handle an accumulation boundary; the engine's counters are up to date."""
        self._inner.step_finished(result)
        engine = self._engine
        if engine is None:
            return
        values = {"lr": float(engine.optimizer.param_groups[0]["lr"])}
        if result.grad_norm is not None and math.isfinite(result.grad_norm):
            values["grad_norm"] = result.grad_norm
        if engine.config.fp16.enabled:
            values["loss_scale"] = engine.scaler.scale
        for writer in self._writers:
            for name, value in values.items():
                writer.add_scalar(f"Train/Samples/{name}", value, engine.progress.global_samples)
            writer.flush()

    def close(self) -> None:
        """Release resources; the engine is closed."""
        self._inner.close()
        for writer in self._writers:
            writer.close()
