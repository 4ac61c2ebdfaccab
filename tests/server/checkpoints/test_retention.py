"""Checkpoint retention over all trials of an experiment."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, serve, validation
from tests.waiting import until
from zerolab.storage.store import CheckpointStore
from zeroserver.orchestrator.unit_of_work import UnitOfWork

GRID: dict[str, Any] = {
    "hyperparameters": {
        "deepspeed_config": "ds_config.json",
        "n": {"type": "categorical", "vals": [1, 2, 3]},
    },
    "searcher": {"name": "grid", "metric": "loss", "max_length": 10},
}


def policy(experiment_best: int, trial_best: int, trial_latest: int) -> dict[str, int]:
    return {
        "save_experiment_best": experiment_best,
        "save_trial_best": trial_best,
        "save_trial_latest": trial_latest,
    }


def kept_steps(server: Server) -> dict[int, list[int]]:
    """Return the steps of complete checkpoints by trial."""
    steps_by_trial: dict[int, list[int]] = {}
    for trial in server.trials():
        page = server.get(f"/trials/{trial['id']}/checkpoints", state="COMPLETED")
        steps_by_trial[trial["id"]] = sorted(row["steps_completed"] for row in page["checkpoints"])
    return steps_by_trial


def train(server: Server, trial_id: int, *losses: float, end: bool = True) -> None:
    """Run a trial that validates and saves after 1, 2, ... batches."""
    spec = server.begin(trial_id)
    for steps, loss in enumerate(losses, start=1):
        server.report(spec.run_id, validation(steps, loss), checkpoint(steps, f"trial {trial_id}"))
    if end:
        server.exit(spec.run_id, 0)


def test_experiment_best_replaces_checkpoint_of_ended_trial(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    root = server.services.orchestrator.home.checkpoints
    for trial_id in (1, 2, 3):
        (root / checkpoint(1, f"trial {trial_id}").uuid).mkdir()
    train(server, 1, 0.9)
    assert kept_steps(server) == {1: [1], 2: [], 3: []}
    assert server.trial(1)["best_checkpoint"] == checkpoint(1, "trial 1").uuid
    train(server, 2, 0.1)
    assert kept_steps(server) == {1: [], 2: [1], 3: []}
    assert server.trial(1)["best_checkpoint"] is None
    train(server, 3, 0.5)
    assert kept_steps(server) == {1: [], 2: [1], 3: []}
    server.services.orchestrator.janitor.close()
    assert [path.name for path in root.iterdir()] == [checkpoint(1, "trial 2").uuid]


@pytest.mark.parametrize("how", ["deleted", "displaced"])
def test_pending_removals_run_at_next_start(tmp_path: Path, how: str) -> None:
    with serve(tmp_path) as server:
        root = server.services.orchestrator.home.checkpoints
        server.submit(checkpoint_storage=policy(0, 0, 1))
        server.add_agent()
        spec = server.begin()
        for steps in (1, 2):
            (root / checkpoint(steps).uuid).mkdir()
            (root / checkpoint(steps).uuid / "weights").write_bytes(b"x")
        server.report(spec.run_id, checkpoint(1))
        server.services.orchestrator.janitor.close()  # as after a crash
        server.report(spec.run_id, checkpoint(2))
        server.exit(spec.run_id, 0)
        if how == "deleted":
            server.request("DELETE", "/experiments/1")
        assert len(list(root.iterdir())) == 2
    with serve(tmp_path) as server:
        remaining = set() if how == "deleted" else {checkpoint(2).uuid}
        until("the files go", lambda: {path.name for path in root.iterdir()} == remaining)
        until("no mark is left", lambda: server.sql("SELECT * FROM chores") == [])


def test_shutdown_leaves_slow_removals_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroserver.store.janitor._CLOSE_DIRECTORIES_S", 0.0)
    removing, go_on = threading.Event(), threading.Event()
    delete = CheckpointStore.delete

    def delete_slowly(self: CheckpointStore, uuid: str) -> None:
        removing.set()
        go_on.wait()
        delete(self, uuid)

    monkeypatch.setattr(CheckpointStore, "delete", delete_slowly)
    with serve(tmp_path) as server:
        root = server.services.orchestrator.home.checkpoints
        server.submit(checkpoint_storage=policy(0, 0, 1))
        server.add_agent()
        spec = server.begin()
        for steps in (1, 2, 3):
            (root / checkpoint(steps).uuid).mkdir()
            server.report(spec.run_id, checkpoint(steps))
        removing.wait()
    go_on.set()
    with serve(tmp_path):
        until(
            "the files go", lambda: [path.name for path in root.iterdir()] == [checkpoint(3).uuid]
        )


def names_of_chores(server: Server) -> list[str]:
    return [json.loads(chore)["name"] for (chore,) in server.sql("SELECT chore FROM chores")]


def test_failed_removal_is_retried_later(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        root = server.services.orchestrator.home.checkpoints
        server.submit(checkpoint_storage=policy(0, 0, 1))
        server.add_agent()
        spec = server.begin()
        (root / checkpoint(1).uuid).write_bytes(b"no directory")
        (root / checkpoint(2).uuid).mkdir()
        for steps in (1, 2, 3):
            server.report(spec.run_id, checkpoint(steps))
        until("the other one goes", lambda: not (root / checkpoint(2).uuid).exists())
        marked = [checkpoint(1).uuid]
        until("one mark stays", lambda: names_of_chores(server) == marked)
    (root / checkpoint(1).uuid).unlink()
    with serve(tmp_path) as server:
        until("no mark is left", lambda: server.sql("SELECT * FROM chores") == [])


def test_orphaned_archive_is_removed(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        archives = server.services.orchestrator.home.archives
        server.submit()
        stored = {path.name for path in archives.iterdir()}
        (archives / f"{'0' * 64}.tar.gz").write_bytes(b"of a submission that was cut off")
        (archives / f".{'1' * 64}.tar.gz.abc").write_bytes(b"half of one")
        others = {"notes.txt", f"{'0' * 64}.txt", f"{'0' * 63}.tar.gz"}
        for name in others:
            (archives / name).write_bytes(b"not an archive of the server")
    with serve(tmp_path):
        assert {path.name for path in archives.iterdir()} == stored | others


def test_archive_of_failed_submission_is_removed(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        archives = server.services.orchestrator.home.archives
        server.write(
            lambda work: work.run(
                "CREATE TRIGGER full BEFORE INSERT ON experiments "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        )
        with pytest.raises(AssertionError, match="internal error"):
            server.submit()
        assert list(archives.iterdir()) == []


def test_late_validation_applies_retention(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9)
    spec = server.begin(2)
    server.report(spec.run_id, checkpoint(1, "trial 2"))
    assert kept_steps(server) == {1: [1], 2: [1], 3: []}
    server.report(spec.run_id, validation(1, 0.1))
    assert kept_steps(server) == {1: [], 2: [1], 3: []}


def test_trial_best_is_kept_in_experiment(
    server: Server,
) -> None:
    server.submit(checkpoint_storage=policy(2, 1, 1), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.5, 0.3, 0.4, 0.9)
    assert kept_steps(server) == {1: [2, 3, 4], 2: [], 3: []}
    train(server, 2, 0.2, 0.1, 0.6)
    # Trial 1 keeps its best and its latest; 0.4 is no longer among the experiment's two.
    assert kept_steps(server) == {1: [2, 4], 2: [1, 2, 3], 3: []}


def test_continued_trial_keeps_latest_checkpoint(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9, end=False)
    train(server, 2, 0.1)
    assert kept_steps(server) == {1: [1], 2: [1], 3: []}
    assert server.trial(1)["latest_checkpoint"] == checkpoint(1, "trial 1").uuid
    train(server, 3, 0.5)
    server.exit(server.run_of(1).run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"
    assert kept_steps(server) == {1: [], 2: [1], 3: []}


def test_leftovers_of_old_version_are_removed_at_end(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9)
    train(server, 2, 0.1)

    def put_back(work: UnitOfWork) -> None:
        work.run("UPDATE checkpoints SET state = ? WHERE trial_id = ?", ("COMPLETED", 1))

    server.write(put_back)
    train(server, 3, 0.5)
    assert server.experiment()["state"] == "COMPLETED"
    assert kept_steps(server) == {1: [], 2: [1], 3: []}
