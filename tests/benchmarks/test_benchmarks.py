"""Smoke tests of the benchmarks that need no GPU; their figures are not checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.searching import suite

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--sizes", "1m", "--ranks", "1", "--precisions", "fp32", "--stages", "0", "--threads", "1"]
ENGINE = ["engine", *TINY, "--peers", "limit", "zerolab", "--rounds", "1", "--steps", "1"]
ENGINE += ["--micro", "1", "--warmup", "1"]
ONE_SEED = ["search", "run", "--seeds", "1", "--horizon", "1", "--methods"]
# The scale of each takes half a second.
OBJECTIVES = [*ONE_SEED, "random", "pbt", "--objectives", *list(suite.OBJECTIVES)[::3]]
SEARCHERS = [
    *(*ONE_SEED, "tpe_asha", "asha promoting", "asha stopping", "adaptive_asha", "pasha"),
    *("--objectives", "branin", "conditional optimizer", "digits mlp", "diverging late"),
]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "arguments",
    [
        ["server", "--quick"],
        ["scheduler", "--jobs", "200", "--rounds", "1"],
        pytest.param(["submit", "--rounds", "1", "--warm-up", "0"], marks=pytest.mark.soak),
        pytest.param(
            ["queue_cost", "--trials", "2", "--kinds", "command", "--warm-up", "0"],
            marks=pytest.mark.soak,
        ),
        ["controller", "--rounds", "1", "--batches", "2"],
        pytest.param(OBJECTIVES, marks=pytest.mark.soak),
        SEARCHERS,
        ["search", "cost", "--methods", "asha promoting", "tpe_asha"],
        ENGINE,
        pytest.param([*ENGINE, "--together", "--before", str(ROOT)], marks=pytest.mark.soak),
    ],
    ids=[
        "server",
        "scheduler",
        "submit",
        "queue cost",
        "controller",
        "objectives",
        "searchers",
        "search cost",
        "engine",
        "engine together",
    ],
)
def test_benchmark_runs(arguments: list[str], tmp_path: Path) -> None:
    name, *options = arguments
    if name == "engine":
        options += ["--output", str(tmp_path / "engine.json")]
    if arguments[:2] == ["search", "run"]:
        options += ["--results", str(tmp_path / "search.jsonl"), "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "failed\n" not in text
    assert "Traceback" not in text
