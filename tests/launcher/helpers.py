"""Runs without a server."""

import signal
from pathlib import Path

import psutil

from tests.specs import sections
from tests.waiting import until
from zerolab.contract.outcome import Outcome, read_outcome
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import RunSpec, write_run_spec
from zerolab.launcher.interface import LauncherProcess


def make_run(
    path: Path, script: str, slots: int = 2, entrypoint: str = "python script.py", **config: object
) -> RunFolder:
    """Prepare a run whose ranks are ``script``."""
    folder = RunFolder(path)
    folder.create()
    (folder.model / "script.py").write_text(script)
    spec = RunSpec(
        experiment_id=1,
        trial_id=1,
        run_id=1,
        **sections(
            {"entrypoint": entrypoint, "searcher": {"max_length": {"batches": 1}}, **config}
        ),
        hparams={},
        trial_seed=1,
        slots=slots,
        model_dir=str(folder.model),
        run_dir=str(folder.path),
        checkpoint_dir=str(path / "checkpoints"),
    )
    write_run_spec(spec, folder.spec)
    return folder


def code_of(process: LauncherProcess) -> int:
    """Wait for the launcher to end, and return its exit code."""
    until("the launcher has ended", lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def end_of(process: LauncherProcess, folder: RunFolder) -> Outcome:
    """Wait for the launcher to end, and return how the run ended."""
    code_of(process)
    outcome = read_outcome(folder.path)
    assert outcome is not None, folder.launcher_log.read_text()
    return outcome


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def catches_sigterm(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def wait_for_exit(*pids: int) -> None:
    """Wait until these processes have ended."""
    until(
        "these processes have ended",
        lambda: [p for p in pids if alive(p)],
        lambda remaining: not remaining,
    )
