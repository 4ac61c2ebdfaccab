"""Cost of image reports: ``python -m benchmarks.media``, about three minutes.

1. Rate of a training loop (matrix products) that reports an image at every tenth batch, and of one
   without reports. The two take turns, so that other processes of the machine affect both equally.
   Each begins when all earlier reports are stored, and is longer than the interval of uploads.
   The CPU time of the training thread is compared, too: it shows what the reports cost the script
   itself where the machine is too busy for the rates.
2. Time of the page's requests when ten trials have 1,000 images each.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.metrics.reporting import server
from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.messages import AgentRegistration, SlotInfo
from zerolab.contract.spec import RunSpec
from zerolab.extensions.media.images import image_items
from zerolab.reports.media_files import MEDIA_DIR
from zerolab.reports.reporter import Reporter

GOAL_RATIO = 0.98
GOAL_MS = 200.0
EVERY = 10
"""Batches for each image."""
BATCHES = 150
"""Batches of a measured loop: several seconds."""


def make_runs(client: Client, directory: Path, trials: int) -> tuple[int, list[RunSpec]]:
    """Have the server start the trials of a grid search; return the agent and the runs."""
    model = directory / "model"
    model.mkdir()
    (model / "train.py").touch()
    config: dict[str, Any] = {
        "name": "media",
        "entrypoint": "python train.py",
        "hyperparameters": {"n": {"type": "categorical", "vals": list(range(trials))}},
        "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 10**9}},
    }
    slots = [SlotInfo(number, "cpu") for number in range(trials)]
    agent = client.register_agent(AgentRegistration("bench", "localhost", slots))
    client.create_experiment(config, archive.pack(model))
    work = client.work(agent, 0, 10)
    while len(work.runs) < trials:
        work = client.work(agent, work.version, 10)
    runs = []
    for item in work.runs:
        client.run_started(item.run_id)
        run_dir = str(directory / "runs" / str(item.run_id))
        runs.append(msgspec.structs.replace(item.spec, master=client.url, run_dir=run_dir))
    return agent, runs


def images(size: int) -> Callable[[int], np.ndarray]:
    """Return a function that draws another smooth image of a size for each step."""
    axis = np.linspace(0.0, 6.0, size)
    return lambda step: (
        0.5 + 0.5 * np.sin(axis[:, None, None] + 0.1 * step) * np.cos(axis[:, None] * [1, 2, 3])
    )


def train(work: np.ndarray, report: Callable[[int], None] | None) -> tuple[float, float]:
    """Return the seconds of a loop, and those of CPU time of its thread."""
    start, used = time.perf_counter(), time.thread_time()
    for step in range(BATCHES):
        work @ work
        if report is not None and step % EVERY == 0:
            report(step)
    return time.perf_counter() - start, time.thread_time() - used


def drain(reporter: Reporter) -> None:
    """Wait until all reports and media are stored."""
    assert reporter.flush(60.0)
    queue = Path(reporter.spec.run_dir) / MEDIA_DIR
    while queue.exists() and any(queue.iterdir()):
        time.sleep(0.05)


def compare(reporter: Reporter, size: int, rounds: int) -> tuple[float, float, float]:
    """Return the ratios of the rates and of the CPU times, and milliseconds for each image."""
    draw, count = images(size), 0
    drawn = [draw(step) for step in range(64)]
    spent: list[float] = []

    def report(_step: int) -> None:
        nonlocal count
        count += 1
        image = drawn[count % 64] + count * 1e-6
        start = time.thread_time()
        reporter.report_media("image", count, image_items(image))
        spent.append(1000 * (time.thread_time() - start))

    work = np.random.default_rng(0).random((800, 800))  # about 20 ms a batch
    train(work, None)
    rates, cpu_times = [], []
    for number in range(rounds):
        times = {}
        for kind in (None, report) if number % 2 else (report, None):
            drain(reporter)
            times[kind] = train(work, kind)
        rates.append(times[None][0] / times[report][0])
        cpu_times.append(times[None][1] / times[report][1])
    return statistics.median(rates), statistics.median(cpu_times), statistics.median(spent)


def time_requests(client: Client, trials: list[int], image: str) -> dict[str, list[float]]:
    """Return the times of the page's requests in milliseconds."""
    calls: dict[str, Callable[[int], object]] = {
        "names": client.media_names,
        "1,000 rows of a name": lambda trial: client.media(trial, name="image"),
        "one image": lambda trial: b"".join(client.media_file(trial, image)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for trial in trials:
            for name, call in calls.items():
                start = time.perf_counter()
                call(trial)
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--images", type=int, default=1000, help="for each trial")
    parser.add_argument("--size", type=int, default=64, help="width and height in pixels")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as client:
        agent, runs = make_runs(client, Path(folder), options.trials)
        draw = images(options.size)
        start = time.perf_counter()
        for run in runs:
            reporter = Reporter(run)
            for step in range(options.images):
                reporter.report_media("image", step, image_items(draw(step)))
            assert reporter.close(120.0)
            client.work(agent, 0, 0)  # an agent that is silent for long loses its runs
        seconds = time.perf_counter() - start
        count = options.trials * options.images
        print(f"{count:,} images of {options.size} x {options.size} reported and stored in "
              f"{seconds:.1f} s ({1000 * seconds / count:.2f} ms each)")  # fmt: skip
        digest = client.media(runs[0].trial_id, name="image", step=0)[0]["digest"]
        times = time_requests(client, [run.trial_id for run in runs], digest)
        for name, values in times.items():
            print(f"{name}: median {statistics.median(values):.1f} ms, max {max(values):.1f} ms")
        spare = msgspec.structs.replace(runs[0], run_dir=str(Path(folder) / "spare"))
        reporter = Reporter(spare)
        ratio, cpu_ratio, each_ms = compare(reporter, options.size, options.rounds)
        reporter.close(1.0)
        print(f"training with an image every {EVERY} batches: {ratio:.3f} of the rate without "
              f"(goal {GOAL_RATIO}), {cpu_ratio:.3f} by the CPU time of its thread; "
              f"{each_ms:.2f} ms of it for each image")  # fmt: skip
        slowest = max(statistics.median(values) for values in times.values())
    return 0 if ratio >= GOAL_RATIO and slowest <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
