"""Trials that begin with the weights of another trial's checkpoint."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, on_sqlite, validation
from zerolab.contract.spec import EXIT_PREEMPTED, CheckpointRef
from zerolab.searcher import Create

RANDOM = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 2}
SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "double", "minval": 0, "maxval": 1},
}


def single(**fields: Any) -> dict[str, Any]:
    return {"name": "single", "metric": "loss", "max_length": 100, **fields}


def train_with_checkpoints(server: Server, *steps: int, name: str = "") -> list[str]:
    """Train one trial of experiment 1 with checkpoints at some steps."""
    server.submit(checkpoint_storage={"save_trial_latest": 5})
    server.add_agent()
    spec = server.begin()
    for step in steps:
        server.report(spec.run_id, validation(step, 1 / step), checkpoint(step, name))
    server.exit(spec.run_id, 0)
    return [checkpoint(step, name).uuid for step in steps]


def create_from(server: Server, source: int, number: int = 3) -> None:
    """Create a trial of experiment 1 with the weights of another."""
    operation = Create(number, {"lr": 0.5}, 7, source=source)
    server.write(lambda work: work.operations.execute(1, [operation]))


@on_sqlite
@pytest.mark.parametrize("by", ["trial", "checkpoint"])
def test_warm_start_applies_to_every_trial(server: Server, by: str) -> None:
    first, last = train_with_checkpoints(server, 10, 20)
    source = {"source_trial_id": 1} if by == "trial" else {"source_checkpoint_uuid": first}
    uuid = last if by == "trial" else first
    experiment = server.submit(hyperparameters=SPACE, searcher={**RANDOM, **source})
    assert experiment["source_checkpoint"] == uuid
    root = str(server.services.orchestrator.home.checkpoints)
    spec = server.begin(2)
    assert spec.latest_checkpoint == CheckpointRef(uuid, 0, root=root, warm_start=True)
    assert server.trial(2)["steps_completed"] == 0
    server.report(spec.run_id, validation(5, 0.9), checkpoint(5, "own"))
    server.exit(spec.run_id, EXIT_PREEMPTED)
    again = server.begin(2).latest_checkpoint
    assert again == CheckpointRef(checkpoint(5, "own").uuid, 5)
    assert [point[0] for point in server.get("/trials/2/metrics")["metrics"][0]["points"]] == [5]


@on_sqlite
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"source_trial_id": 9}, "source_trial_id: must be a trial with a checkpoint, got 9, which "
         "does not exist"),
        ({"source_trial_id": 1}, "got 1, which has no checkpoint"),
        ({"source_checkpoint_uuid": checkpoint(3).uuid}, "must be a complete checkpoint"),
    ],
)  # fmt: skip
def test_missing_warm_start_source_is_rejected(
    server: Server, source: dict[str, Any], problem: str
) -> None:
    server.submit()
    response = server.try_submit(searcher=single(**source))
    assert response.status_code == 422
    assert problem in response.json()["error"]["message"]
    assert len(server.get("/experiments")["experiments"]) == 1


@on_sqlite
def test_restart_before_checkpoint_warm_starts_again(
    server: Server,
) -> None:
    (uuid,) = train_with_checkpoints(server, 10)
    server.submit(searcher=single(source_trial_id=1))
    spec = server.begin(2)
    server.report(spec.run_id, validation(5, 0.9))
    server.exit(spec.run_id, 1)
    server.tick(2)
    again = server.begin(2)
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.uuid == uuid
    assert server.get("/trials/2/metrics")["metrics"] == []  # it reports all of them again


def test_warm_start_source_is_retained(server: Server) -> None:
    first, _, _ = train_with_checkpoints(server, 10, 20, 30)
    server.submit(searcher=single(source_checkpoint_uuid=first))
    statement = "UPDATE experiments SET config = replace(config, :old, :new)"
    server.execute(statement, old='_trial_latest":5', new='_trial_latest":1')
    server.services.orchestrator.configs.configs.clear()
    server.write(lambda work: work.checkpoints.apply_to_experiment(1))
    uuids = {row["uuid"] for row in server.get("/experiments/1/checkpoints")["checkpoints"]
            if row["state"] == "COMPLETED"}  # fmt: skip
    assert uuids == {first, checkpoint(30).uuid}
    response = server.http.delete("/api/v1/experiments/1")
    assert response.status_code == 409
    assert "are needed by experiment 2" in response.json()["error"]["message"]
    server.act("kill", 2)
    server.exit(server.work()[0].run_id, -9)
    assert server.http.delete("/api/v1/experiments/1").status_code == 204


def two_trials(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM)
    server.add_agent(slots=3)


@on_sqlite
def test_searcher_trial_starts_from_validated_checkpoint(
    server: Server,
) -> None:
    two_trials(server)
    spec = server.begin(1)
    server.report(spec.run_id, checkpoint(5), validation(10, 0.5), checkpoint(10))
    server.report(spec.run_id, checkpoint(15))
    create_from(server, source=1)
    trial = server.trial(3)
    assert trial["hparams"] == {"lr": 0.5}
    assert (trial["source_trial_id"], trial["source_checkpoint"]) == (1, checkpoint(10).uuid)


def test_trial_waits_for_source_checkpoint(server: Server) -> None:
    two_trials(server)
    spec = server.begin(1)
    server.report(spec.run_id, checkpoint(5), validation(10, 0.5))
    create_from(server, source=1)
    server.tick()
    assert len(server.work()) == 2
    assert "waits for a checkpoint" in server.trial(3)["waiting_reason"]
    server.report(spec.run_id, checkpoint(10), checkpoint(20))
    server.tick()
    begun = server.begin(3).latest_checkpoint
    assert begun is not None
    assert begun.uuid == checkpoint(10).uuid


def test_newest_checkpoint_is_the_fallback_source(server: Server) -> None:
    two_trials(server)
    spec = server.begin(1)
    server.report(spec.run_id, checkpoint(5), validation(10, 0.5))
    create_from(server, source=1)
    server.exit(spec.run_id, 0)
    assert server.trial(3)["source_checkpoint"] == checkpoint(5).uuid
    assert server.begin(3).trial_id == 3


@on_sqlite
def test_source_without_checkpoint_fails_only_its_trial(server: Server) -> None:
    two_trials(server)
    spec = server.begin(1)
    server.report(spec.run_id, validation(10, 0.5))
    create_from(server, source=1)
    server.exit(spec.run_id, 0)
    failed = server.trial(3)
    assert failed["state"] == "ERROR"
    assert failed["error"] == "trial 1, whose weights it starts with, has no checkpoint"
    assert server.experiment()["state"] == "ACTIVE"
    assert server.begin(2).latest_checkpoint is None
