"""Cost of reporting for the training: ``python -m benchmarks.metrics.reporting``, 30 seconds.

1. Time of one ``report_metrics()`` with two metrics, in a loop that reports at every step.
2. Rate of a training loop (matrix products, a report at every batch) with a server that is there,
   with one that is gone, and with no reports at all. The three take turns, each many times, so
   that what else the machine does falls on all of them alike.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.messages import AgentRegistration, SlotInfo
from zerolab.contract.spec import RunSpec
from zerolab.paths import Home
from zerolab.reports.reporter import Reporter

GOAL_US = 10.0
GOAL_RATIO = 0.99
REPORTS = 20_000
NOWHERE = "http://127.0.0.1:1"  # nothing listens on port 1


@contextlib.contextmanager
def server(directory: Path) -> Iterator[Client]:
    """Run a server with a data directory of its own."""
    home = Home(directory / "home").create()
    command = [sys.executable, "-m", "zeroserver", "--home", str(home.path), "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with Client(url, home.ensure_token()) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def make_run(client: Client, directory: Path) -> RunSpec:
    """Have the server start a trial; return its run."""
    model = directory / "model"
    model.mkdir()
    (model / "train.py").touch()
    config: dict[str, Any] = {
        "name": "reporting",
        "entrypoint": "python train.py",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10**9}},
    }
    registration = AgentRegistration("bench", "localhost", [SlotInfo(0, "cpu")])
    agent = client.register_agent(registration)
    client.create_experiment(config, archive.pack(model))
    work = client.work(agent, 0, 10)
    while not work.runs:
        work = client.work(agent, work.version, 10)
    spec = work.runs[0].spec
    client.run_started(spec.run_id)
    return msgspec.structs.replace(spec, master=client.url, run_dir=str(directory / "run"))


def time_reports(reporter: Reporter) -> list[float]:
    """Return the time of each of many reports, in microseconds."""
    times = []
    for step in range(REPORTS):
        metrics = {"loss": 1.0 / (step + 1), "lr": 0.1}
        start = time.perf_counter_ns()
        reporter.report_metrics("training", step, metrics)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def training_rate(report: Callable[[int, dict[str, float]], None], first: int) -> float:
    """Train 100 batches of about a millisecond; return batches per second."""
    weights = np.ones((160, 160)) / 160
    batch = np.ones((160, 160))
    start = time.perf_counter()
    for step in range(first, first + 100):
        for _ in range(4):
            batch = batch @ weights
        report(step, {"loss": float(batch[0, 0])})
    return 100 / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each kind of training")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as client:
        directory = Path(name)
        spec = make_run(client, directory)
        gone = msgspec.structs.replace(spec, master=NOWHERE, run_dir=str(directory / "gone"))
        with_server, without = Reporter(spec), Reporter(gone)
        times = sorted(time_reports(with_server))
        p50, p99 = times[len(times) // 2], times[len(times) * 99 // 100]
        print(f"report(): p50 {p50:.1f} us, p99 {p99:.1f} us (goal: p50 <= {GOAL_US:g} us)")
        kinds: dict[str, Callable[[int, dict[str, float]], None]] = {
            "no reports": lambda step, metrics: None,
            "server there": lambda step, m: with_server.report_metrics("training", step, m),
            "server gone": lambda step, m: without.report_metrics("training", step, m),
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds):
            for kind, report in kinds.items():
                rates[kind].append(training_rate(report, REPORTS + 100 * number))
        for kind, found in rates.items():
            print(f"{kind:13} {statistics.median(found):8.1f} batches/s")
        # Neighbours in time are compared: what slows the machine slows both.
        pairs = zip(rates["server gone"], rates["server there"], strict=True)
        ratio = statistics.median(away / there for away, there in pairs)
        print(f"server gone / there: {ratio:.4f} (goal: >= {GOAL_RATIO})")
        arrived = with_server.close(60)
        print(f"everything arrived: {arrived}")
        without.close(0)
    return 0 if p50 <= GOAL_US and ratio >= GOAL_RATIO and arrived else 1


if __name__ == "__main__":
    sys.exit(main())
