"""Prove on one GPU that the engine is correct and fast: one script, at most 8 minutes.

    python benchmarks/gpu/prove.py                        on a machine with a GPU
    python benchmarks/gpu/prove.py --rehearse             on a CPU, with tiny models
    python benchmarks/gpu/prove.py --steps parity speed   only these steps

It runs from a checkout, without an installation and without a network. Packages that the machine
lacks are installed from ``benchmarks/gpu/wheels`` (see ``wheels.sh``) into a temporary folder.

The most important step comes first. Every step is a process of its own with a time limit, and
reports each case as soon as it is measured. A step that fails, hangs or is killed costs only its
own remaining cases. After each case ``results.json`` in the output folder is complete and valid.
``results.md`` has the same as tables.

Exit code: 0 when every step finished and no case failed, 1 otherwise, 2 for a wrong argument.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT, ROOT / "platform", ROOT / "trials", ROOT / "server"]
WHEELS = ROOT / "benchmarks" / "gpu" / "wheels"
POLL_S = 0.2


@dataclass(frozen=True)
class Step:
    """One step: a module of this package, or any command."""

    name: str
    shows: str
    limit_s: float
    """Seconds until the step is killed, unless earlier steps have left time over."""

    command: tuple[str, ...] = ()
    """Empty: ``python -m benchmarks.gpu.NAME``."""


STEPS = [
    Step("tests", "the GPU tests of docs/contribute/gpu.md", 100),
    Step("parity", "stages 0-3 against a plain loop", 70),
    Step("speed", "samples/s and MFU against a loop by hand, DDP and FSDP2", 170),
    Step("offload", "speed and largest model with states in host memory", 70),
    Step("overlap", "copies and collectives hidden behind computing at stage 3", 25),
    Step("experiment", "digits through server, agent and metrics", 45),
]
TOTAL_S = 480.0


@dataclass
class Outcome:
    """Result of one step, and the cases that it reported."""

    step: str
    shows: str
    state: str = "not reached"
    """finished, failed (with an exit code), killed (by a signal), timed out, or not reached."""

    seconds: float = 0.0
    cases: list[dict[str, Any]] = field(default_factory=list)
    log_tail: str = ""
    """The end of the log of a step that did not finish."""

    @property
    def is_good(self) -> bool:
        """True if the step finished and none of its cases failed."""
        return self.state == "finished" and all(case.get("ok") is not False for case in self.cases)


def run_steps(
    steps: list[Step],
    folder: Path,
    environment: dict[str, str],
    *,
    rehearse: bool,
    total_s: float,
    kill: str | None = None,
) -> list[Outcome]:
    """Run steps one after the other; a bad step does not keep the others from running.

    Args:
        steps: Most important first.
        folder: Gets ``results.json``, ``results.md``, and a log of each step.
        environment: Variables of the steps' processes.
        rehearse: Pass ``--rehearse`` to the steps.
        total_s: Seconds for all steps; where they do not suffice, later steps are cut short.
        kill: Kill this step with SIGKILL after its first case, to rehearse a crash.
    """
    deadline = time.monotonic() + total_s
    outcomes = [Outcome(step.name, step.shows) for step in steps]
    later_s = sum(step.limit_s for step in steps)
    for step, outcome in zip(steps, outcomes, strict=True):
        later_s -= step.limit_s
        # A step may use the time that earlier ones have left over.
        left_s = deadline - time.monotonic()
        limit_s = min(left_s, max(step.limit_s, left_s - later_s))
        if limit_s > 5:
            print(f"\n== {step.name}: {step.shows} (at most {limit_s:.0f} s)", flush=True)
            run_step(
                step,
                outcome,
                folder,
                environment,
                limit_s=limit_s,
                rehearse=rehearse,
                kill=step.name == kill,
                save=lambda: save(outcomes, folder, rehearse=rehearse),
            )
            print(f"== {step.name}: {outcome.state} after {outcome.seconds:.0f} s", flush=True)
            if outcome.log_tail:
                print(outcome.log_tail, flush=True)
        save(outcomes, folder, rehearse=rehearse)
    return outcomes


def run_step(
    step: Step,
    outcome: Outcome,
    folder: Path,
    environment: dict[str, str],
    *,
    limit_s: float,
    rehearse: bool,
    kill: bool,
    save: Any,
) -> None:
    """Run one step in a process group of its own and collect its cases while it runs."""
    cases_file = folder / f"{step.name}.jsonl"
    cases_file.unlink(missing_ok=True)
    log = folder / f"{step.name}.log"
    command = list(step.command) or [sys.executable, "-m", f"benchmarks.gpu.{step.name}"]
    command += ["--cases", str(cases_file), "--limit", f"{limit_s:.0f}"]
    command += ["--rehearse"] * rehearse
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    timed_out = False
    try:
        while True:
            code = process.poll()
            read_cases(cases_file, outcome, save)
            timed_out = time.monotonic() - began > limit_s
            if code is not None or timed_out:
                break
            if kill and outcome.cases:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)
    finally:
        # The group outlives its leader where ranks or a server were started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    outcome.seconds = time.monotonic() - began
    if timed_out:
        outcome.state = f"timed out after {limit_s:.0f} s"
    elif code < 0:
        outcome.state = f"killed by signal {-code}"
    elif code:
        outcome.state = f"failed with exit code {code}"
    else:
        outcome.state = "finished"
    if outcome.state != "finished":
        outcome.log_tail = log.read_text(errors="replace")[-2000:]


def read_cases(file: Path, outcome: Outcome, save: Any) -> None:
    """Print and save the cases that a step has reported since the last call."""
    if not file.exists():
        return
    complete, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    lines = complete.splitlines()
    for line in lines[len(outcome.cases) :]:
        case = json.loads(line)
        outcome.cases.append(case)
        print(describe(case), flush=True)
        save()


def describe(case: dict[str, Any]) -> str:
    """Format a case as one line."""
    verdict = {True: "ok", False: "FAILED"}.get(case.get("ok"), "")
    figures = ", ".join(
        f"{key} {value}" for key, value in case.items() if key not in ("case", "ok")
    )
    return f"  {case['case']:44} {verdict:6} {figures}".rstrip()


def save(outcomes: list[Outcome], folder: Path, *, rehearse: bool) -> None:
    """Write ``results.json`` and ``results.md``; both are replaced at once."""
    content = {
        "machine": machine(),
        "rehearsal": rehearse,
        "steps": [
            {
                "step": outcome.step,
                "state": outcome.state,
                "seconds": round(outcome.seconds, 1),
                "cases": outcome.cases,
            }
            for outcome in outcomes
        ],
    }
    replace(folder / "results.json", json.dumps(content, indent=1) + "\n")
    replace(folder / "results.md", tables(outcomes, content["machine"]))


def replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new text, never a part."""
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def tables(outcomes: list[Outcome], machine: dict[str, Any]) -> str:
    """Format all results as Markdown."""
    lines = [", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    for outcome in outcomes:
        lines += [f"## {outcome.step}: {outcome.shows}", ""]
        lines += [f"{outcome.state}, {outcome.seconds:.0f} s", ""]
        columns = list(dict.fromkeys(key for case in outcome.cases for key in case))
        if columns:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            for case in outcome.cases:
                cells = (str(case.get(column, "")) for column in columns)
                lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
            lines.append("")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Describe the machine without importing torch, whose import may be what fails."""
    gpu = "none"
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    versions = {name: version_of(name) for name in ("torch", "numpy")}
    return {"gpu": gpu, "cores": os.cpu_count(), "python": sys.version.split()[0], **versions}


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or ``missing``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def install_missing(wheels: Path, target: Path) -> list[str]:
    """Install the wheels of packages that this Python lacks; no network, no dependencies.

    Args:
        wheels: Folder of wheels; need not exist.
        target: Folder to install into.

    Returns:
        Names of the installed packages.
    """
    missing = {}
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if version_of(name) == "missing":
            missing[name] = wheel
    if missing:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--target", str(target), *map(str, missing.values())]
        subprocess.run(command, check=True)
    return list(missing)


def step_environment(packages: Path) -> dict[str, str]:
    """Return the variables of the steps: the sources and the extra packages are importable."""
    paths = [*map(str, SOURCES), str(packages), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU with tiny models")
    parser.add_argument("--steps", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu", metavar="DIR"
    )
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="DIR")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, metavar="N", help="limit for all steps"
    )
    parser.add_argument(
        "--kill", choices=names, metavar="NAME", help="kill a step, to rehearse a crash"
    )
    return parser.parse_args()


def main() -> int:
    """Run the chosen steps and print a summary."""
    options = parse_arguments()
    if not options.rehearse and re.search("none", machine()["gpu"]):
        print("prove.py: needs an NVIDIA GPU, found none; use --rehearse on a CPU", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print(", ".join(f"{key} {value}" for key, value in machine().items()), flush=True)
    with tempfile.TemporaryDirectory(prefix="prove-packages-") as packages:
        installed = install_missing(options.wheels, Path(packages))
        if installed:
            print(f"installed from wheels: {', '.join(installed)}", flush=True)
        outcomes = run_steps(
            [step for step in STEPS if step.name in options.steps],
            options.output,
            step_environment(Path(packages)),
            rehearse=options.rehearse,
            total_s=options.seconds - (time.monotonic() - began),
            kill=options.kill,
        )
    print(f"\n{time.monotonic() - began:.0f} s in all; results in {options.output}")
    for outcome in outcomes:
        failed = sum(case.get("ok") is False for case in outcome.cases)
        print(f"  {outcome.step:12} {outcome.state}, {len(outcome.cases)} cases, {failed} failed")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
