"""Autotuning of a small GPT against an exhaustive grid: throughput of the results, and cost.

    python -m benchmarks.training.autotune                  without and with a memory limit
    python -m benchmarks.training.autotune --memory 0.7     GB of a rank; 0 for what is available

Every candidate of the grid runs alone for ``--steps`` measured steps, as a candidate does in the
last rung of the search. Then the results of both run in turns, ``--rounds`` times. Times are CPU
times of rank 0, so that other programs on the machine disturb them less; costs are CPU times of all
processes.

A table goes to stdout, and everything to ``benchmarks/results/autotune.json``.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerolab.launcher.devices import find_slots
from zerotrial.extensions.autotune.candidates import Candidate, Profile, make_space
from zerotrial.extensions.autotune.runner import Runner
from zerotrial.extensions.autotune.search import Result
from zerotrial.extensions.autotune.settings import Settings
from zerotrial.extensions.autotune.subjects import ExperimentSubject
from zerotrial.extensions.autotune.tuning import tune

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib_gpt"
EXPERIMENT = """
entrypoint: model_def:StdlibTrial
hyperparameters:
  deepspeed_config: ds_config.json
  overwrite_deepspeed_args: {{train_batch_size: {batch}, gradient_accumulation_steps: null}}
  training_bytes: 300000
  context: {context}
  width: {width}
  depth: {depth}
  heads: 4
searcher: {{name: single, metric: validation_loss, max_length: {{batches: 1000}}}}
resources: {{slots_per_trial: {ranks}}}
"""


def main() -> None:
    options = _options()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "gpt")
        shutil.copytree(EXAMPLE, folder)
        file = folder / "tune.yaml"
        file.write_text(EXPERIMENT.format(**vars(options)))
        for memory in options.memory:
            rows.append(_compare(file, Path(directory), memory, options))
            _write(rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--memory", type=float, nargs="+", default=[0.0, 0.5], help="GB of a rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    return parser.parse_args()


def _compare(
    file: Path, directory: Path, memory: float, options: argparse.Namespace
) -> dict[str, Any]:
    subject, slots = ExperimentSubject(file), find_slots(options.ranks, cpu=True)
    limit = int(1e9 * memory) or None
    settings = Settings(
        steps=options.steps,
        clock="cpu",
        memory_bytes=limit,
        results_dir=directory / f"results_{memory}",
    )
    tuning = tune(subject, slots, settings, report=lambda line: print(line, flush=True))
    print(tuning.table_file.read_text())
    profile = tuning.profile
    runner = Runner(subject, slots, directory, clock="cpu")
    try:
        grid = _grid(runner, profile, options.steps)
        measured = {c: r for c, r in grid.items() if r.status == "measured"}
        best = min(measured, key=lambda c: statistics.median(measured[c].step_seconds))
        tuned = tuning.best.candidate
        seconds = _in_turns(runner, profile, [tuned, best], options)
    finally:
        runner.close()
    grid_s = sum(result.cpu_s for result in grid.values())
    return {
        "memory_gb": memory,
        "tuned": str(tuned),
        "best_of_grid": str(best),
        "throughput_ratio": seconds[best] / seconds[tuned],
        "samples_per_cpu_second": profile.train_batch / seconds[tuned],
        "runs": tuning.runs,
        "candidates": len(grid),
        "grid": Counter(result.status for result in grid.values()),
        "tuning_cpu_s": tuning.cpu_s,
        "grid_cpu_s": grid_s,
        "cost_ratio": tuning.cpu_s / grid_s,
    }


def _grid(runner: Runner, profile: Profile, steps: int) -> dict[Candidate, Result]:
    """Measure every candidate that the planner does not drop."""
    needs = {estimate.layout: estimate for estimate in profile.layouts}
    results = {}
    for candidate in make_space(profile).grid():
        if profile.problem(needs[candidate.layout]) is None:
            results[candidate] = _measure(runner, profile, candidate, steps)
    return results


def _measure(runner: Runner, profile: Profile, candidate: Candidate, steps: int) -> Result:
    result = runner.measure(candidate, profile.data_ranks, steps, None, profile.run_bytes)
    middle = statistics.median(result.step_seconds) if result.step_seconds else 0.0
    print(f"{candidate}: {result.status}, {1000 * middle:.1f} ms", flush=True)
    return result


def _in_turns(
    runner: Runner, profile: Profile, candidates: Sequence[Candidate], options: argparse.Namespace
) -> dict[Candidate, float]:
    """Return the median step of each candidate over several runs, which take turns."""
    steps: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for _ in range(options.rounds):
        for candidate in steps:
            result = _measure(runner, profile, candidate, options.steps)
            steps[candidate].extend(result.step_seconds)
    return {candidate: statistics.median(seconds) for candidate, seconds in steps.items()}


def _write(rows: list[dict[str, Any]]) -> None:
    folder = Path(__file__).parents[1] / "results"
    folder.mkdir(exist_ok=True)
    (folder / "autotune.json").write_text(json.dumps(rows, indent=2))
    for row in rows:
        print(
            f"memory {row['memory_gb'] or 'available'}: tuned {row['tuned']} "
            f"({row['samples_per_cpu_second']:.4g} samples/s); grid {row['best_of_grid']}: "
            f"throughput {row['throughput_ratio']:.1%} of the best, at {row['cost_ratio']:.1%} of "
            f"the cost ({row['runs']} of {row['candidates']} runs, "
            f"{row['tuning_cpu_s']:.0f} of {row['grid_cpu_s']:.0f} CPU s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
