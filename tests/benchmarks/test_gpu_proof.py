"""The runner of the GPU proof: a step that fails, hangs or is killed costs only itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.prove import STEPS, Outcome, Step, run_steps, step_environment
from benchmarks.gpu.tests import FILES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes


def step(name: str, code: str, limit_s: float = 60.0) -> Step:
    """A step that reports one case and then runs ``code``."""
    report = "import sys; file = sys.argv[sys.argv.index('--cases') + 1]\n"
    report += 'open(file, \'a\').write(\'{"case": "first", "ok": true}\\n\')\n'
    return Step(name, "a step of a test", limit_s, (sys.executable, "-c", report + code))


def run(steps: list[Step], folder: Path, **more: object) -> list[Outcome]:
    total_s = sum(step.limit_s for step in steps)
    options: dict[str, object] = {"rehearse": True, "total_s": total_s, **more}
    return run_steps(steps, folder, step_environment(folder), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "limit_s", "state"),
    [
        ("sys.exit(3)", 60.0, "failed with exit code 3"),
        ("raise RuntimeError('out of luck')", 60.0, "failed with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "killed by signal 9"),
        ("import time; time.sleep(600)", 6.0, "timed out after 6 s"),
        (
            "import subprocess; subprocess.Popen(['sleep', '600']); input()",
            60.0,
            "failed with exit code 1",
        ),
    ],
    ids=["exit", "exception", "killed", "hangs", "leaves a process"],
)
def test_bad_step_keeps_its_cases_and_the_others_run(
    tmp_path: Path, code: str, limit_s: float, state: str
) -> None:
    outcomes = run([step("bad", code, limit_s), step("good", "")], tmp_path)
    assert [outcome.state for outcome in outcomes] == [state, "finished"]
    assert all(outcome.cases == [{"case": "first", "ok": True}] for outcome in outcomes)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [entry["state"] for entry in saved["steps"]] == [state, "finished"]
    assert "| first | True |" in (tmp_path / "results.md").read_text()


def test_kill_option_kills_after_the_first_case(tmp_path: Path) -> None:
    steps = [step("one", "import time; time.sleep(600)"), step("two", "")]
    outcomes = run(steps, tmp_path, kill="one")
    assert [outcome.state for outcome in outcomes] == ["killed by signal 9", "finished"]
    assert not outcomes[0].is_good


def test_steps_beyond_the_total_are_not_reached(tmp_path: Path) -> None:
    outcomes = run([step("one", ""), step("two", "")], tmp_path, total_s=1.0)
    assert [outcome.state for outcome in outcomes] == ["not reached", "not reached"]
    assert not any(outcome.is_good for outcome in outcomes)


def test_step_with_a_failed_case_is_not_good(tmp_path: Path) -> None:
    code = 'open(file, \'a\').write(\'{"case": "second", "ok": false}\\n\')'
    (outcome,) = run([step("one", code)], tmp_path)
    assert outcome.state == "finished"
    assert not outcome.is_good


def test_limits_leave_time_for_a_second_run() -> None:
    assert sum(step.limit_s for step in STEPS) <= 480


def test_tests_step_runs_the_files_of_the_page() -> None:
    page = (ROOT / "docs" / "contribute" / "gpu.md").read_text(encoding="utf-8")
    assert all(file in page for file in FILES)


@pytest.mark.soak
@pytest.mark.slow
def test_rehearsal_finishes(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/prove.py", "--rehearse", "--output", str(tmp_path)]
    command += ["--steps", "offload", "overlap", "experiment"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout
    assert all(entry["state"] == "finished" and entry["cases"] for entry in saved["steps"])
