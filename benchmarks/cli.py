"""Response time of the command line: imports, help, version, a list from the server.

    python -m benchmarks.cli

The goals: ``import zerolab`` 0.10 s, ``zerolab --help`` 0.25 s. A table goes to stdout, and
everything to ``benchmarks/results/cli.json``.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "cli.json"
ROUNDS = 15
CASES: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": (["-c", "pass"], None),
    "import zerolab": (["-c", "import zerolab"], 0.10),
    "zerolab --help": (["-m", "zerolab", "--help"], 0.25),
    "zerolab experiment list --help": (["-m", "zerolab", "experiment", "list", "--help"], 0.25),
    "zerolab version": (["-m", "zerolab", "version"], 0.25),
    "import torch": (["-c", "import torch"], None),
}


def main() -> int:
    results = {}
    print(f"{'':32} {'median s':>9} {'best s':>9} {'goal s':>7}")
    for name, (words, goal) in CASES.items():
        seconds = [_time(words) for _ in range(ROUNDS if name != "import torch" else 3)]
        median, best = statistics.median(seconds), min(seconds)
        results[name] = {"median_s": median, "best_s": best, "goal_s": goal, "all_s": seconds}
        print(f"{name:32} {median:9.3f} {best:9.3f} {goal if goal else '':>7}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))
    return 0


def _time(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
