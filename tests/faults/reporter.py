"""Process that reports at a given rate and records each report that has returned."""

import mmap
import struct
import time
from pathlib import Path

from zerolab.contract.spec import RunSpec, read_run_spec
from zerolab.reports.reporter import Reporter

_LEDGER = struct.Struct("<qq")


class Ledger:
    """Shared memory with the last reported step and a stop flag; it outlives the process."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_LEDGER.size))
        with path.open("r+b") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), _LEDGER.size)).cast("q")

    @property
    def step(self) -> int:
        return self._memory[0]

    @step.setter
    def step(self, step: int) -> None:
        self._memory[0] = step

    @property
    def stop(self) -> bool:
        return bool(self._memory[1])

    @stop.setter
    def stop(self, stop: bool) -> None:
        self._memory[1] = stop


def value_of(spec: RunSpec, step: int) -> float:
    return spec.run_id + step / 1024


def report(spec_path: str, ledger_path: str, first: int, pause_s: float) -> int:
    """Report steps from ``first`` on until killed or stopped."""
    spec, ledger = read_run_spec(Path(spec_path)), Ledger(Path(ledger_path))
    reporter = Reporter(spec, longest_pause_s=0.1)
    step = first
    while not ledger.stop:
        group = "validation" if step % 50 == 0 else "training"
        reporter.report_metrics(group, step, {"loss": value_of(spec, step)})
        ledger.step = step
        step += 1
        time.sleep(pause_s)
    return 0 if reporter.close(300) else 1
