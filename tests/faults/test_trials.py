"""Real ranks that are killed, hang or get SIGTERM."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.helpers import end_of
from tests.specs import sections
from tests.trial.helpers import last_checkpoint, metrics
from tests.waiting import until
from zerolab.contract.run_folder import RunFolder
from zerolab.contract.spec import (
    ENV_COLLECTIVE_TIMEOUT,
    EXIT_PREEMPTED,
    CheckpointRef,
    RunSpec,
    write_run_spec,
)
from zerolab.launcher.process import start_launcher

pytestmark = pytest.mark.processes

LENGTH = 12


def make_run(
    path: Path,
    fault: str = "none",
    at_batch: int = 7,
    latest: CheckpointRef | None = None,
    length: int = LENGTH,
    checkpoint_dir: Path | None = None,
    **hparams: Any,
) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    shutil.copy(Path(__file__).parent / "trial_model.py", folder.model / "trial_model.py")
    spec = RunSpec(
        experiment_id=1,
        trial_id=1,
        run_id=1,
        **sections(
            {
                "entrypoint": "trial_model:FaultyTrial",
                "searcher": {"max_length": {"batches": length}},
                "scheduling_unit": 5,
                "min_checkpoint_period": {"batches": 3},
                "min_validation_period": {"batches": 4},
            }
        ),
        hparams={"fault": fault, "at_batch": at_batch, **hparams},
        trial_seed=3,
        slots=2,
        model_dir=str(folder.model),
        run_dir=str(folder.path),
        checkpoint_dir=str(checkpoint_dir or path / "checkpoints"),
        latest_checkpoint=latest,
    )
    write_run_spec(spec, folder.spec)
    return folder


def launch(folder: RunFolder, **environment: str) -> Any:
    return start_launcher(folder, {"OMP_NUM_THREADS": "1", **environment})


def read_stderr(folder: RunFolder) -> str:
    return "".join(folder.stderr(rank).read_text() for rank in (0, 1))


def test_killed_rank_resumes_bitwise_equal(tmp_path: Path) -> None:
    uninterrupted = make_run(tmp_path / "whole")
    killed = make_run(tmp_path / "killed", "kill")
    processes = [(launch(folder), folder) for folder in (uninterrupted, killed)]
    outcomes = [end_of(*process_and_folder) for process_and_folder in processes]
    assert outcomes[0].exit_code == 0, read_stderr(uninterrupted)
    assert outcomes[1].exit_code == -signal.SIGKILL, read_stderr(killed)
    latest = last_checkpoint(killed.path)
    assert latest is not None
    assert 3 <= latest.steps_completed <= 7
    killed.reason.unlink(missing_ok=True)  # a new run starts without one
    resumed = make_run(tmp_path / "killed", latest=latest)
    assert end_of(launch(resumed), resumed).exit_code == 0, read_stderr(resumed)
    for group in ("training", "validation"):
        assert metrics(resumed.path, group) == metrics(uninterrupted.path, group)


def test_hung_rank_fails_with_rank_and_operation(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "hang", at_batch=4, file=str(tmp_path / "hangs"))
    outcome = end_of(launch(folder, **{ENV_COLLECTIVE_TIMEOUT: "1234"}), folder)
    assert outcome.exit_code not in (0, 64, 65, 66, 67), read_stderr(folder)
    reason = outcome.reason or ""
    assert "rank 1 has not called it within 2 s; this is rank 0" in reason, reason
    assert "reduce_scatter" in reason or "sum" in reason, reason


def test_sigterm_saves_checkpoint(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    folder = make_run(tmp_path / "run", "signal_ready", length=10_000_000, file=str(ready))
    process = launch(folder)
    until("the rank trains", ready.exists, details=lambda: read_stderr(folder))
    os.kill(process.pid, signal.SIGTERM)
    outcome = end_of(process, folder)
    assert outcome.exit_code == EXIT_PREEMPTED, read_stderr(folder)
    latest = last_checkpoint(folder.path)
    assert latest is not None
    assert latest.steps_completed >= 7
