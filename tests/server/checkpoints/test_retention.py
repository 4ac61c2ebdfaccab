"""Which checkpoints an experiment keeps, over all of its trials."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, serve, validation
from tests.waiting import until

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


def kept(server: Server) -> dict[int, list[int]]:
    """Trial to the steps of its checkpoints that are there."""
    found: dict[int, list[int]] = {}
    for trial in server.trials():
        page = server.get(f"/trials/{trial['id']}/checkpoints", state="COMPLETED")
        found[trial["id"]] = sorted(each["steps_completed"] for each in page["checkpoints"])
    return found


def train(server: Server, trial_id: int, *losses: float, end: bool = True) -> None:
    """Run a trial that validates and saves after 1, 2, ... batches."""
    spec = server.begin(trial_id)
    for steps, loss in enumerate(losses, start=1):
        server.report(spec.run_id, validation(steps, loss), checkpoint(steps, f"trial {trial_id}"))
    if end:
        server.exit(spec.run_id, 0)


def test_the_best_of_an_experiment_replaces_one_of_a_trial_that_has_ended(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    root = server.services.world.home.checkpoints
    for trial_id in (1, 2, 3):
        (root / checkpoint(1, f"trial {trial_id}").uuid).mkdir()
    train(server, 1, 0.9)
    assert kept(server) == {1: [1], 2: [], 3: []}
    assert server.trial(1)["best_checkpoint"] == checkpoint(1, "trial 1").uuid
    train(server, 2, 0.1)
    assert kept(server) == {1: [], 2: [1], 3: []}
    assert server.trial(1)["best_checkpoint"] is None
    train(server, 3, 0.5)
    assert kept(server) == {1: [], 2: [1], 3: []}
    server.services.world.janitor.close()
    assert [path.name for path in root.iterdir()] == [checkpoint(1, "trial 2").uuid]


@pytest.mark.parametrize("how", ["deleted", "displaced"])
def test_files_that_a_dead_server_had_still_to_remove_go_at_the_next_start(
    tmp_path: Path, how: str
) -> None:
    with serve(tmp_path) as server:
        root = server.services.world.home.checkpoints
        server.submit(checkpoint_storage=policy(0, 0, 1))
        server.add_agent()
        spec = server.begin()
        for steps in (1, 2):
            (root / checkpoint(steps).uuid).mkdir()
            (root / checkpoint(steps).uuid / "weights").write_bytes(b"x")
        server.report(spec.run_id, checkpoint(1))
        server.services.world.janitor.close()  # as if it died: what is committed is not carried out
        server.report(spec.run_id, checkpoint(2))
        server.exit(spec.run_id, 0)
        if how == "deleted":
            server.request("DELETE", "/experiments/1")
        assert len(list(root.iterdir())) == 2
    with serve(tmp_path) as server:
        left = set() if how == "deleted" else {checkpoint(2).uuid}
        until("the files go", lambda: {path.name for path in root.iterdir()} == left)
        until("no mark is left", lambda: server.sql("SELECT * FROM chores") == [])


def names_of_chores(server: Server) -> list[str]:
    return [json.loads(chore)["name"] for (chore,) in server.sql("SELECT chore FROM chores")]


def test_what_cannot_be_removed_stays_marked_and_holds_nothing_up(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        root = server.services.world.home.checkpoints
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


def test_an_archive_that_no_experiment_has_does_not_stay(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        archives = server.services.world.home.archives
        server.submit()
        kept = {path.name for path in archives.iterdir()}
        (archives / f"{'0' * 64}.tar.gz").write_bytes(b"of a submission that was cut off")
        (archives / f".{'1' * 64}.tar.gz.abc").write_bytes(b"half of one")
    with serve(tmp_path):
        assert {path.name for path in archives.iterdir()} == kept


def test_the_archive_of_a_submission_that_fails_in_the_database_goes(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        archives = server.services.world.home.archives
        server.write(
            lambda _world, tx: tx.run(
                "CREATE TRIGGER full BEFORE INSERT ON experiments "
                "BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        )
        with pytest.raises(AssertionError, match="a bug of its own"):
            server.submit()
        assert list(archives.iterdir()) == []


def test_a_validation_that_comes_after_its_checkpoint_displaces_as_well(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9)
    spec = server.begin(2)
    server.report(spec.run_id, checkpoint(1, "trial 2"))
    assert kept(server) == {1: [1], 2: [1], 3: []}
    server.report(spec.run_id, validation(1, 0.1))
    assert kept(server) == {1: [], 2: [1], 3: []}


def test_what_keeps_a_checkpoint_in_its_own_trial_keeps_it_in_the_experiment(
    server: Server,
) -> None:
    server.submit(checkpoint_storage=policy(2, 1, 1), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.5, 0.3, 0.4, 0.9)
    assert kept(server) == {1: [2, 3, 4], 2: [], 3: []}
    train(server, 2, 0.2, 0.1, 0.6)
    # Trial 1 keeps its best and its latest; 0.4 is no longer among the experiment's two.
    assert kept(server) == {1: [2, 4], 2: [1, 2, 3], 3: []}


def test_a_trial_that_goes_on_keeps_its_latest_whoever_is_the_best(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9, end=False)
    train(server, 2, 0.1)
    assert kept(server) == {1: [1], 2: [1], 3: []}
    assert server.trial(1)["latest_checkpoint"] == checkpoint(1, "trial 1").uuid
    train(server, 3, 0.5)
    server.exit(server.run_of(1).run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"
    assert kept(server) == {1: [], 2: [1], 3: []}


def test_what_an_earlier_version_left_goes_at_the_end_of_the_experiment(server: Server) -> None:
    server.submit(checkpoint_storage=policy(1, 0, 0), **GRID)
    server.add_agent(slots=3)
    train(server, 1, 0.9)
    train(server, 2, 0.1)

    def put_back(_world: Any, transaction: Any) -> None:
        transaction.run("UPDATE checkpoints SET state = ? WHERE trial_id = ?", ("COMPLETED", 1))

    server.write(put_back)
    train(server, 3, 0.5)
    assert server.experiment()["state"] == "COMPLETED"
    assert kept(server) == {1: [], 2: [1], 3: []}
