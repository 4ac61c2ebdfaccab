"""Parts shared by all steps: their arguments, and the file to which they report cases."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["Cases", "describe_error", "device_of", "parse_step", "synchronize"]


class Cases:
    """Reports each case as soon as it is measured.

    Args:
        file: JSON lines, appended to; None prints to stdout only.
        limit_s: Seconds that the whole step may take.
    """

    def __init__(self, file: Path | None, limit_s: float) -> None:
        self._file = file
        self._ends = time.monotonic() + limit_s

    @property
    def seconds_left(self) -> float:
        """Seconds until the step is killed."""
        return self._ends - time.monotonic()

    def add(self, case: str, *, ok: bool | None = None, **figures: Any) -> None:
        """Report one case.

        Args:
            case: Its name.
            ok: Whether it passed; None for a figure without a threshold.
            figures: Numbers or short texts; floats are rounded to four digits.
        """
        row: dict[str, Any] = {"case": case}
        if ok is not None:
            row["ok"] = ok
        for key, value in figures.items():
            row[key] = float(f"{value:.4g}") if isinstance(value, float) else value
        line = json.dumps(row)
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def add_error(self, case: str, error: BaseException) -> None:
        """Report a case that raised."""
        self.add(case, ok=False, error=describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error on one line, cut to 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def parse_step(description: str | None) -> tuple[argparse.Namespace, Cases]:
    """Parse the arguments that every step takes: ``--rehearse``, ``--cases``, ``--limit``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU with tiny models")
    parser.add_argument("--cases", type=Path, help="file to append results to")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the whole step")
    options = parser.parse_args()
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return options, Cases(options.cases, options.limit)


def device_of(options: argparse.Namespace) -> torch.device:
    """Return the device of a step."""
    return torch.device("cpu") if options.rehearse else torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
