"""Run the GPU tests of docs/contribute/gpu.md and report each test file, and each failed test.

On a CPU most of them are skipped; the rehearsal shows that they can be collected and run.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from benchmarks.gpu.cases import Cases, parse_step

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "tests/engine/test_cuda.py",
    "tests/engine/builder/test_activation_checkpointing.py",
    "tests/trial/test_on_gpu.py",
    "tests/trial/test_ranks_on_gpus.py",
]
"""As in docs/contribute/gpu.md."""

PLUGINS = ["xdist.plugin", "pytest_timeout", "_hypothesis_pytestplugin"]


def main() -> None:
    options, cases = parse_step(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *FILES]
        command += [f"--junitxml={report}", f"--timeout={max(30, options.limit * 0.6):.0f}"]
        # Only these plugins: others that a machine has may warn, and warnings are errors here.
        plugins = [name for name in PLUGINS if importlib.util.find_spec(name.split(".")[0])]
        command += [word for name in plugins for word in ("-p", name)]
        if not options.rehearse and "xdist.plugin" in plugins:
            command += ["-n", "4"]
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        code = subprocess.call(command, cwd=ROOT, env=environment)
        if not report.exists():
            sys.exit(code or "pytest wrote no report")
        summarize(report, cases, needs_gpu=not options.rehearse)


def summarize(report: Path, cases: Cases, *, needs_gpu: bool) -> None:
    """Report the counts of each file, and every failed test.

    Args:
        report: Written by pytest, JUnit's XML.
        cases: To report to.
        needs_gpu: Count a file of which every test was skipped as failed.
    """
    counts: dict[str, Counter[str]] = {}
    failures = []
    for test in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in test}
        state = "passed"
        if kinds & {"failure", "error"}:
            state = "failed"
            failures.append(test)
        elif "skipped" in kinds:
            state = "skipped"
        counts.setdefault(test.get("classname", ""), Counter())[state] += 1
    for name, count in counts.items():
        good = not count["failed"] and (count["passed"] > 0 or not needs_gpu)
        cases.add(
            name,
            ok=good,
            passed=count["passed"],
            failed=count["failed"],
            skipped=count["skipped"],
        )
    for test in failures:
        problem = next(child for child in test if child.tag in {"failure", "error"})
        text = (problem.get("message") or "").splitlines() or [""]
        cases.add(f"{test.get('name')}", ok=False, error=text[0][:200])


if __name__ == "__main__":
    main()
