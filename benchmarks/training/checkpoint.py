"""Speed of saving a checkpoint of one rank, compared with the disk's.

    python -m benchmarks.training.checkpoint --gigabytes 1 --directory DIR

A save and a plain write of as many bytes take turns, both with fsync. The goal of a save is 80 % of
the plain write's rate. An asynchronous save has two times: until training continues, and until the
checkpoint is valid. Loading reads from the page cache.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

import zerotrial
from zerotrial.engine.engine import Engine

GOAL_RATIO = 0.8
WIDTH = 2880
"""A layer of this width has 8.3 M parameters: 100 MB of fp32 weights and Adam states."""


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action took."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(path: Path, size: int, content: memoryview) -> None:
    """Write ``size`` bytes and fsync them."""
    with path.open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(content[: min(size, len(content))])
        os.fsync(file.fileno())


def make_engine(stage: int, gigabytes: float) -> Engine:
    """Return an engine with optimizer states of about this size."""
    layers = max(1, round(gigabytes * 1e9 / 12 / WIDTH**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerotrial.initialize(model=model, config=config).engine
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    return engine


@dataclass(frozen=True)
class Times:
    """Seconds of one round."""

    disk: float
    save: float
    returned: float
    valid: float
    load: float


def measure(engine: Engine, directory: Path, content: memoryview) -> tuple[int, Times]:
    """Return the size of a checkpoint in bytes, and the times of one round."""
    checkpoint = engine.checkpoint
    save = seconds(lambda: checkpoint.save(directory, tag="sync"))
    size = sum(file.stat().st_size for file in (directory / "sync").iterdir())
    disk = seconds(lambda: write_plainly(directory / "plain", size, content))
    (directory / "plain").unlink()
    start = time.perf_counter()
    checkpoint.save(directory, tag="async", async_save=True)
    returned = time.perf_counter() - start
    checkpoint.wait()
    valid = time.perf_counter() - start
    load = seconds(lambda: checkpoint.load(directory, "sync"))
    for tag in ("sync", "async"):
        shutil.rmtree(directory / tag)
    return size, Times(disk, save, returned, valid, load)


def main() -> int:
    """Print one line for each stage; the exit code is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], metavar="N")
    parser.add_argument("--directory", help="on the disk to be measured")
    options = parser.parse_args()
    content = memoryview(torch.randint(256, (2**24,), dtype=torch.uint8).numpy())
    ratios = []
    print("stage    GB  disk GB/s  save GB/s  ratio  async: continues s, valid s  load GB/s")
    for stage in options.stages:
        engine = make_engine(stage, options.gigabytes)
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            measure(engine, Path(directory), content)  # the first save allocates
            rounds = [measure(engine, Path(directory), content) for _ in range(options.rounds)]
        gigabytes = rounds[0][0] / 1e9
        columns = zip(*(astuple(times) for _, times in rounds), strict=True)
        middle = Times(*(statistics.median(column) for column in columns))
        ratio = statistics.median(times.disk / times.save for _, times in rounds)
        ratios.append(ratio)
        print(
            f"{stage:5} {gigabytes:5.2f} {gigabytes / middle.disk:10.2f}"
            f" {gigabytes / middle.save:10.2f} {ratio:6.2f} {middle.returned:19.2f}"
            f" {middle.valid:8.2f} {gigabytes / middle.load:10.2f}",
            flush=True,
        )
    print(f"goal: ratio of at least {GOAL_RATIO}, lowest {min(ratios):.2f}")
    return int(min(ratios) < GOAL_RATIO)


if __name__ == "__main__":
    sys.exit(main())
