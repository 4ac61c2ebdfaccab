"""Continuing experiments, and pausing, canceling, continuing and forking single trials."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, training, validation
from zerolab.contract.spec import EXIT_INVALID_HP, EXIT_PREEMPTED, CheckpointRef

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "double", "minval": 0, "maxval": 1},
}


def random(trials: int = 3, **fields: Any) -> dict[str, Any]:
    return {
        "name": "random", "metric": "loss", "max_length": 20, "max_trials": trials,
        "max_concurrent_trials": 2, **fields,
    }  # fmt: skip


def continue_experiment(server: Server, experiment_id: int = 1, **config: Any) -> Any:
    """Continue an experiment; return the whole response."""
    path = f"/api/v1/experiments/{experiment_id}/continue"
    return server.http.post(path, json={"config": config})


def error_message(response: Any, status: int = 409) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def train_to(server: Server, trial_id: int, steps: int, code: int = 0) -> None:
    """Train a trial to ``steps``, with a validation and a checkpoint, and exit."""
    spec = server.begin(trial_id)
    record = checkpoint(steps, str(trial_id))
    server.report(spec.run_id, training(steps, 1.0), validation(steps, 1 / steps), record)
    server.exit(spec.run_id, code, "boom" if code else None)


@pytest.mark.needs_extension("continued_experiments")
def test_continue_single_to_greater_length(server: Server) -> None:
    server.submit()
    server.add_agent()
    train_to(server, 1, 100)
    assert server.experiment()["state"] == "COMPLETED"
    response = continue_experiment(server, searcher={"max_length": {"batches": 200}})
    assert response.is_success, response.text
    experiment = response.json()["experiment"]
    assert (experiment["state"], experiment["ended_at"]) == ("ACTIVE", None)
    assert experiment["config"]["searcher"]["max_length"] == {"batches": 200}
    spec = server.begin()
    assert spec.latest_checkpoint == CheckpointRef(checkpoint(100, "1").uuid, 100)
    assert spec.fit is not None
    assert spec.fit.max_length is not None
    assert spec.fit.max_length.count == 200
    server.report(spec.run_id, training(150, 0.5), validation(200, 0.001))
    server.exit(spec.run_id, 0)
    assert (server.experiment()["state"], server.experiment()["progress"]) == ("COMPLETED", 1)
    curve = server.get("/trials/1/metrics", group="training")["metrics"][0]
    assert curve["points"] == [[100, 1.0], [150, 0.5]]
    seed = experiment["config"]["reproducibility"]["experiment_seed"]
    assert server.experiment()["config"]["reproducibility"]["experiment_seed"] == seed


@pytest.mark.needs_extension("continued_experiments")
def test_continue_canceled_search_creates_same_trials(server: Server) -> None:
    for number in (1, 2):  # the first is canceled and continued, the second is not
        server.submit(
            hyperparameters=SPACE, searcher=random(4), reproducibility={"experiment_seed": 5},
            activate=number == 1,
        )  # fmt: skip
    server.add_agent(slots=2)
    server.exit(server.begin(1).run_id, 0)
    for trial_id in (2, 5):
        spec = server.begin(trial_id)
        server.report(spec.run_id, checkpoint(5, str(trial_id)))
    server.act("cancel")
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    states = [trial["state"] for trial in server.trials()]
    assert states == ["COMPLETED", "CANCELED", "CANCELED"]
    assert continue_experiment(server).is_success
    resumed = server.begin(2).latest_checkpoint
    assert resumed is not None
    assert resumed.steps_completed == 5
    while server.experiment()["state"] == "ACTIVE":
        server.exit(server.work()[0].run_id, 0)
    server.act("activate", 2)
    while server.experiment(2)["state"] == "ACTIVE":
        server.exit(server.work()[0].run_id, 0)
    first, second = ([(t["hparams"], t["seed"]) for t in server.trials(n)] for n in (1, 2))
    assert first == second
    assert len(first) == 4
    assert {trial["state"] for trial in server.trials()} == {"COMPLETED"}


@pytest.mark.needs_extension("continued_experiments")
def test_continue_search_with_more_trials(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(2))
    server.add_agent(slots=2)
    for trial_id in (1, 2):
        train_to(server, trial_id, 20)
    response = continue_experiment(server, searcher={"max_trials": 4})
    assert response.json()["experiment"]["progress"] == 0.5
    assert [trial["state"] for trial in server.trials()] == ["COMPLETED"] * 2 + ["QUEUED"] * 2
    for trial_id in (3, 4):
        train_to(server, trial_id, 20)
    assert server.experiment()["state"] == "COMPLETED"
    server.services.orchestrator.searches.searchers.clear()  # a replay ends the same
    assert error_message(continue_experiment(server)).startswith(
        "experiment 1: is COMPLETED, and no trial can be"
    )


@pytest.mark.needs_extension("continued_experiments", "queue")
def test_continue_retries_failed_trials_with_changes(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(2), max_restarts=0)
    server.add_agent(slots=2)
    train_to(server, 1, 20)
    train_to(server, 2, 10, code=1)
    assert [trial["state"] for trial in server.trials()] == ["COMPLETED", "ERROR"]
    assert continue_experiment(server, max_restarts=1, resources={"priority": 3}).is_success
    assert server.trial(2)["error"] is None
    assert server.get("/jobs")["jobs"][0]["priority"] == 3
    train_to(server, 2, 12, code=1)
    server.tick(2)
    assert server.trial(2)["restarts"] == 1
    train_to(server, 2, 20)
    assert server.experiment()["state"] == "COMPLETED"


@pytest.mark.needs_extension("continued_experiments")
def test_continue_keeps_warm_start_source(
    server: Server,
) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(2))
    server.act("kill")
    response = continue_experiment(
        server,
        hyperparameters={"lr": 3},
        searcher={"max_length": 10, "max_trials": 1, "metric": "accuracy"},
        reproducibility={"experiment_seed": 1},
        checkpoint_storage={"type": "shared_fs", "host_path": "/tmp"},
    )
    error_message(response, 422)
    problems = {line.partition(": ")[0]: line for line in response.json()["error"]["problems"]}
    assert set(problems) == {
        "hyperparameters.lr", "searcher.max_length", "searcher.max_trials", "searcher.metric",
        "checkpoint_storage.type", "checkpoint_storage.host_path",
        "reproducibility.experiment_seed",
    }  # fmt: skip
    assert (
        "must be at least 20 batches as before, got 10 batches" in problems["searcher.max_length"]
    )
    assert (
        "`zerolab experiment fork 1` starts a new experiment with it" in problems["searcher.metric"]
    )
    assert server.experiment()["state"] == "CANCELED"
    assert server.experiment()["config"]["searcher"]["metric"] == "loss"


@pytest.mark.needs_extension("continued_experiments")
def test_invalid_hparams_are_not_retried(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(1))
    server.add_agent()
    server.exit(server.begin(1).run_id, EXIT_INVALID_HP, "no")
    train_to(server, 2, 20)
    assert continue_experiment(server, searcher={"max_length": 40}).is_success
    assert [trial["state"] for trial in server.trials()] == ["COMPLETED", "QUEUED"]


@pytest.mark.needs_extension("continued_experiments")
def test_continue_without_checkpoint_keeps_curve(
    server: Server,
) -> None:
    server.submit()
    server.add_agent()
    server.report(server.begin().run_id, validation(100, 0.5))
    server.exit(server.work()[0].run_id, 0)
    message = error_message(continue_experiment(server, searcher={"max_length": 200}))
    assert message.startswith("trial 1: has no checkpoint to continue from")
    assert server.experiment()["config"]["searcher"]["max_length"]["batches"] == 100


@pytest.mark.needs_extension("continued_experiments")
def test_continue_is_idempotent(server: Server) -> None:
    server.submit()
    server.add_agent()
    train_to(server, 1, 100)
    longer = {"searcher": {"max_length": 200}}
    for _ in range(2):
        assert continue_experiment(server, **longer).is_success
    assert len(server.work()) == 1
    message = error_message(continue_experiment(server, searcher={"max_length": 300}))
    assert "`zerolab experiment cancel 1` first" in message
    server.act("pause")
    assert "`zerolab experiment activate 1`" in error_message(continue_experiment(server, **longer))


@pytest.mark.needs_extension("continued_experiments")
def test_continue_experiment_paused(server: Server) -> None:
    server.submit()
    server.act("kill")
    response = server.http.post("/api/v1/experiments/1/continue", json={"activate": False})
    assert response.json()["experiment"]["state"] == "PAUSED"
    server.add_agent()
    assert (server.trial()["state"], server.work()) == ("PAUSED", [])
    server.act("activate")
    assert len(server.work()) == 1


# -- single trials --------------------------------------------------------------------------


def two(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(2))
    server.add_agent(slots=2)


def trial_act(server: Server, action: str, trial_id: int = 1) -> Any:
    return server.http.post(f"/api/v1/trials/{trial_id}/{action}")


def test_pause_one_trial(server: Server) -> None:
    two(server)
    first, second = server.begin(1), server.begin(2)
    for _ in range(2):
        assert trial_act(server, "pause").is_success
    assert server.directive(first.run_id) == "preempt"
    assert server.directive(second.run_id) == "train"
    server.report(first.run_id, checkpoint(5))
    server.exit(first.run_id, EXIT_PREEMPTED)
    assert server.trial(1)["state"] == "PAUSED"
    server.act("pause")
    server.exit(second.run_id, EXIT_PREEMPTED)
    message = error_message(trial_act(server, "activate"))
    assert message == "trial 1: its experiment 1 is PAUSED; `zerolab experiment activate 1` first"
    server.act("activate")
    assert [item.spec.trial_id for item in server.work()] == [2]  # the trial itself is paused
    for _ in range(2):
        assert trial_act(server, "activate").is_success
    again = server.begin(1).latest_checkpoint
    assert again is not None
    assert again.steps_completed == 5


def test_activate_trial_while_run_is_stopping(server: Server) -> None:
    two(server)
    spec = server.begin(1)
    trial_act(server, "pause")
    trial_act(server, "activate")
    server.exit(spec.run_id, EXIT_PREEMPTED)
    assert server.begin(1).run_id != spec.run_id


def test_paused_trial_stays_paused_after_failure(server: Server) -> None:
    two(server)
    spec = server.begin(1)
    trial_act(server, "pause")
    server.exit(spec.run_id, -9, "boom")
    server.tick(10)
    assert server.trial(1)["state"] == "PAUSED"


@pytest.mark.parametrize(
    ("action", "of_trial", "cause"),
    [
        ("cancel", True, "canceled"),
        ("cancel", False, "canceled"),
        ("pause", True, "paused"),
        ("pause", False, "paused with its experiment"),
    ],
)
def test_exit_reason_names_action(server: Server, action: str, of_trial: bool, cause: str) -> None:
    """The run and its ranks get the user's action, not "preempted"."""
    two(server)
    spec = server.begin(1)
    if of_trial:
        trial_act(server, action)
    else:
        server.act(action)
    assert server.get(f"/runs/{spec.run_id}/directive", wait_s=0)["cause"] == cause
    server.exit(spec.run_id, EXIT_PREEMPTED, "preempted")
    assert server.get("/trials/1/runs")["runs"][0]["reason"] == cause


def test_exit_reason_of_killed_run(server: Server) -> None:
    two(server)
    spec = server.begin(1)
    trial_act(server, "kill")
    server.exit(spec.run_id, -9, "rank 0 was killed by SIGKILL: memory ran out, or ...")
    assert server.get("/trials/1/runs")["runs"][0]["reason"] == "killed"


def test_exit_reason_of_preempted_run(server: Server) -> None:
    """A batch system may preempt a run that the server did not ask to exit."""
    two(server)
    spec = server.begin(1)
    server.exit(spec.run_id, EXIT_PREEMPTED, "preempted")
    assert server.get("/trials/1/runs")["runs"][0]["reason"] == "preempted"


def test_cancel_one_trial_continues_search(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(3))
    server.add_agent(slots=2)
    spec = server.begin(1)
    for _ in range(2):
        assert trial_act(server, "cancel").json()["trial"]["state"] == "STOPPING"
    assert server.directive(spec.run_id) == "stop"
    server.report(spec.run_id, checkpoint(5))
    server.exit(spec.run_id, EXIT_PREEMPTED)
    assert trial_act(server, "cancel").json()["trial"]["state"] == "CANCELED"
    assert server.trial(3)["state"] == "QUEUED"


def test_continue_canceled_trial_of_running_experiment(server: Server) -> None:
    two(server)
    spec = server.begin(1)
    trial_act(server, "cancel")
    server.report(spec.run_id, checkpoint(5))
    server.exit(spec.run_id, EXIT_PREEMPTED)
    for _ in range(2):
        assert trial_act(server, "continue").is_success
    again = server.begin(1)
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.steps_completed == 5
    server.exit(server.begin(2).run_id, 0)
    assert server.experiment()["state"] == "ACTIVE"
    server.exit(again.run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"


@pytest.mark.needs_extension("continued_experiments")
def test_continue_one_trial_of_ended_experiment(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=random(4))
    server.add_agent(slots=2)
    server.act("kill")
    for item in server.work():
        server.exit(item.run_id, -9)
    assert server.experiment()["state"] == "CANCELED"
    trial_act(server, "continue", 2)
    assert server.experiment()["state"] == "ACTIVE"
    server.exit(server.begin(2).run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"
    assert [trial["state"] for trial in server.trials()] == ["CANCELED", "COMPLETED"]
    assert continue_experiment(server).is_success  # the search can be continued later
    while server.experiment()["state"] == "ACTIVE":
        server.exit(server.work()[0].run_id, 0)
    assert [trial["state"] for trial in server.trials()] == ["COMPLETED"] * 4


def test_continue_rejects_trial_at_full_length(server: Server) -> None:
    server.submit()
    server.add_agent()
    train_to(server, 1, 100)
    message = error_message(trial_act(server, "continue"))
    assert "it has trained for its full length; `zerolab trial fork 1`" in message
    assert "`zerolab experiment continue 1 --set searcher.max_length.batches=...`" in message


def test_fork_trial_warm_starts_experiment(server: Server) -> None:
    two(server)
    train_to(server, 1, 20)
    body = {"config": {"name": "further", "searcher": {"max_length": 50}}}
    response = server.http.post("/api/v1/trials/1/fork", json=body)
    assert response.status_code == 201, response.text
    experiment = response.json()["experiment"]
    assert (experiment["name"], experiment["forked_from"], experiment["searcher_name"]) == (
        "further",
        1,
        "single",
    )
    assert experiment["source_checkpoint"] == checkpoint(20, "1").uuid
    (trial,) = server.trials(2)
    assert trial["hparams"] == server.trial(1)["hparams"]
    spec = server.begin(trial["id"])
    assert spec.latest_checkpoint is not None
    assert spec.latest_checkpoint.warm_start
    message = error_message(server.http.post("/api/v1/trials/2/fork"), 422)
    assert "got 2, which has no checkpoint" in message


@pytest.mark.parametrize("action", ["pause", "activate"])
def test_action_on_ended_trial_names_continue(sqlite_server: Server, action: str) -> None:
    sqlite_server.submit()
    sqlite_server.act("kill")
    message = error_message(trial_act(sqlite_server, action))
    assert message.endswith("`zerolab trial continue 1` continues it from its checkpoint")


def test_action_on_stopped_trial_names_fork(sqlite_server: Server) -> None:
    server = sqlite_server
    asha = {"name": "async_halving", "num_rungs": 2, "divisor": 2}
    server.submit(hyperparameters=SPACE, searcher=random(2, **asha))
    server.add_agent(slots=2)
    killed = server.begin(2)
    trial_act(server, "kill", 2)
    server.exit(killed.run_id, -9)
    train_to(server, 1, 20)
    for trial_id, way in (
        (1, "; `zerolab trial fork 1` starts a new experiment from its checkpoint"),
        (2, ", and it has no checkpoint; `zerolab experiment fork 1` starts from the beginning"),
    ):
        for action in ("pause", "activate", "continue"):
            message = error_message(trial_act(server, action, trial_id))
            assert message.endswith(f"the async_halving searcher has finished it{way}"), message


@pytest.mark.needs_extension("checkpoint_removal", "continued_experiments")
def test_continue_rejects_deleted_source_checkpoint(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit()
    server.add_agent()
    train_to(server, 1, 100)
    uuid = checkpoint(100, "1").uuid
    source = {"max_length": 20, "source_checkpoint_uuid": uuid}
    server.submit(searcher={"name": "single", "metric": "loss", **source})
    server.act("kill", 2)
    server.exit(server.work()[0].run_id, -9)
    assert server.http.delete(f"/api/v1/checkpoints/{uuid}").is_success
    reason = (
        f"cannot be continued: checkpoint {uuid}, whose weights it starts with, has been deleted"
    )
    way = (
        "`zerolab experiment fork 2` starts a new experiment with another "
        "searcher.source_checkpoint_uuid"
    )
    message = error_message(trial_act(server, "continue", 2))
    assert message == f"trial 2: is CANCELED and {reason}, and the trial has no checkpoint; {way}"
    assert error_message(continue_experiment(server, 2)) == f"experiment 2: {reason}; {way}"
    assert (server.experiment(2)["state"], server.trial(2)["state"]) == ("CANCELED", "CANCELED")
