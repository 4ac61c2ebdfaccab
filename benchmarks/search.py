"""Quality of searches over time: our searchers and others on a simulated cluster.

    python -m benchmarks.search run --seeds 30 --jobs 2     # hours; what is there is not run again
    python -m benchmarks.search report                      # tables, significance, the plot
    python -m benchmarks.search cost                        # CPU of a decision at 1,000 trials

Eight workers, 27 epochs, times in full trainings; ``searching/clock.py`` says what costs what. A
method runs until its search is over, or the time is. Every run is a line of
``benchmarks/results/search.jsonl``. Optuna and the packages of
the report: ``pip install --group bench``.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.searching.clock import TIMES, Cluster
from benchmarks.searching.methods import METHODS
from benchmarks.searching.suite import OBJECTIVES

RESULTS = Path(__file__).resolve().parent / "results" / "search.jsonl"
WORKERS = 8

Task = tuple[str, str, int, float]


def simulate(task: Task) -> dict[str, Any]:
    """Run one method on one objective with one seed."""
    method, objective, seed, horizon = task
    cluster = Cluster(OBJECTIVES[objective], WORKERS, seed)
    began = time.process_time()
    cluster.run(METHODS[method](OBJECTIVES[objective].space, seed), horizon)
    regret = cluster.regret([at for at in TIMES if at <= horizon])
    cpu = time.process_time() - began
    return {
        "method": method, "objective": objective, "seed": seed,
        "regret": regret, "trials": len(cluster.trials), "cpu_s": round(cpu, 2),
    }  # fmt: skip


def stored(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(options: argparse.Namespace) -> Iterator[Task]:
    needed = sum(at <= options.horizon for at in TIMES)
    there = {
        (row["method"], row["objective"], row["seed"])
        for row in stored(options.results)
        if len(row["regret"]) >= needed
    }
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for method in options.methods or METHODS:
            for objective in options.objectives or OBJECTIVES:
                if (method, objective, seed) not in there:
                    yield method, objective, seed, options.horizon


def run(options: argparse.Namespace) -> None:
    tasks = list(missing(options))
    print(f"{len(tasks)} runs", flush=True)
    options.results.parent.mkdir(exist_ok=True)
    with options.results.open("a") as file, ProcessPoolExecutor(options.jobs) as pool:
        for done, row in enumerate(pool.map(simulate, tasks), start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if done % 100 == 0:
                print(done, "done", flush=True)


def report(options: argparse.Namespace) -> None:
    from benchmarks.searching import report as reports  # scipy and matplotlib: the group bench

    runs = reports.read(options.results)
    lines = reports.tables(runs) + reports.comparisons(runs) + reports.ranks(runs)
    print("\n".join(lines))
    reports.plot(runs, options.plot)


def cost(options: argparse.Namespace) -> None:
    from benchmarks.searching.cost import decision_ms

    for method in options.methods:
        print(f"{method}: {decision_ms(method):.2f} ms of CPU a decision at 1,000 trials")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--seeds", type=int, default=30)
    command.add_argument("--first-seed", type=int, default=0)
    command.add_argument("--jobs", type=int, default=2)
    command.add_argument("--horizon", type=float, default=20)
    command.add_argument("--methods", nargs="*", choices=METHODS, metavar="METHOD")
    command.add_argument("--objectives", nargs="*", choices=OBJECTIVES, metavar="OBJECTIVE")
    command.add_argument("--results", type=Path, default=RESULTS)
    command.set_defaults(call=run)
    command = commands.add_parser("report")
    command.add_argument("--results", type=Path, nargs="*", default=[RESULTS])
    command.add_argument("--plot", type=Path, default=RESULTS.with_name("search.png"))
    command.set_defaults(call=report)
    command = commands.add_parser("cost")
    command.add_argument("--methods", nargs="*", default=["asha promoting", "tpe_asha"])
    command.set_defaults(call=cost)
    options = parser.parse_args()
    options.call(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
