"""Full and read-only storage: the run fails as temporary, and keeps its checkpoints."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.helpers import make_spec
from tests.disks import mounted
from tests.faults.test_trials import launch, make_run, read_stderr
from tests.launcher.helpers import end_of
from tests.trial.helpers import last_checkpoint, metrics
from zerolab.contract.outcome import read_reason
from zerolab.contract.spec import ENV_RUN_SPEC, EXIT_INFRASTRUCTURE, CheckpointRef, write_run_spec
from zerolab.errors import StorageError
from zerolab.storage.store import CheckpointStore

pytestmark = pytest.mark.processes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one megabyte."""
    with mounted(tmp_path / "disk", "1m") as path:
        yield path


def test_full_disk_is_an_infrastructure_error(tmp_path: Path, disk: Path) -> None:
    storage = disk / "checkpoints"
    filler = disk / "filler"
    full = make_run(tmp_path / "full", "fill", at_batch=7, checkpoint_dir=storage, file=str(filler))
    outcome = end_of(launch(full), full)
    assert outcome.exit_code == EXIT_INFRASTRUCTURE, read_stderr(full)
    assert "No space left on device" in str(outcome.reason)
    latest = last_checkpoint(full.path)
    assert latest is not None
    assert 3 <= latest.steps_completed <= 7
    CheckpointStore(storage).describe(latest.uuid)  # raises if incomplete

    def resume(name: str, latest: CheckpointRef) -> tuple[object, Path]:
        folder = make_run(tmp_path / name, latest=latest, checkpoint_dir=storage)
        return end_of(launch(folder), folder), folder.path

    with pytest.raises(StorageError, match="No space left"):
        CheckpointStore(storage).probe()
    outcome, path = resume("still_full", latest)
    assert outcome.exit_code == EXIT_INFRASTRUCTURE
    assert "checkpoint storage" in str(outcome.reason)
    assert not (path / "metrics.jsonl").exists() or not metrics(path, "training")

    filler.unlink()
    outcome, path = resume("room", latest)
    assert outcome.exit_code == 0
    furthest = CheckpointStore(storage).latest()
    assert furthest is not None
    assert furthest.steps_completed == 12
    assert not list(storage.glob(".partial*"))
    assert min(metrics(path, "training")) > latest.steps_completed


def test_read_only_disk_fails_before_training(tmp_path: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    folder = make_run(tmp_path / "run", checkpoint_dir=disk / "checkpoints")
    outcome = end_of(launch(folder), folder)
    assert outcome.exit_code == EXIT_INFRASTRUCTURE, read_stderr(folder)
    assert "Read-only file system" in str(outcome.reason)
    assert not (folder.path / "metrics.jsonl").exists()


SCRIPT = """
import sys
import zerolab.core
with zerolab.core.init() as context:
    for size in map(int, sys.argv[1:]):
        with context.checkpoint.store_path({"steps_completed": size}) as (path, _):
            (path / "weights").write_bytes(bytes(size))
"""


def quota(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    ("limit", "saved"), [(200_000, [100_000]), (30_000, [])], ids=["later", "from the beginning"]
)
def test_file_size_limit_is_an_infrastructure_error(
    tmp_path: Path, limit: int, saved: list[int]
) -> None:
    write_run_spec(make_spec(tmp_path), tmp_path / "run.json")
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, "100000", "300000"],
        env=os.environ | {ENV_RUN_SPEC: str(tmp_path / "run.json")},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: quota(limit),
    )
    assert completed.returncode == EXIT_INFRASTRUCTURE, completed.stderr
    reason = read_reason(tmp_path)
    assert reason is not None
    assert reason.exit_code == EXIT_INFRASTRUCTURE
    assert "File too large" in str(reason.reason)
    store = CheckpointStore(make_spec(tmp_path).checkpoint_dir)
    assert [checkpoint.steps_completed for checkpoint in store.list()] == saved
