"""Life cycles of experiments, trials and runs on both databases."""

from pathlib import Path

import pytest

from tests.server.helpers import (
    GONE_S,
    PREFIX,
    Clock,
    Server,
    checkpoint,
    on_sqlite,
    progress,
    serve,
    training,
    validation,
)
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_INVALID_HP,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
)
from zerolab.errors import ConflictError
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.store.schema import trials


def test_completed_trial_completes_experiment(server: Server) -> None:
    experiment = server.submit()
    assert (experiment["state"], experiment["num_trials"]) == ("ACTIVE", 1)
    assert server.trial()["state"] == "QUEUED"
    server.add_agent()
    spec = server.begin()
    assert (spec.slots, spec.trial_id, spec.latest_checkpoint) == (1, 1, None)
    assert server.trial()["state"] == "RUNNING"
    server.report(spec.run_id, training(50, 2.0), progress(0.5))
    assert server.experiment()["progress"] == 0.5
    server.report(spec.run_id, validation(100, 0.25), checkpoint(100))
    server.exit(spec.run_id, 0)
    trial, experiment = server.trial(), server.experiment()
    assert (trial["state"], trial["progress"], trial["best_validation"]) == ("COMPLETED", 1, 0.25)
    assert trial["latest_checkpoint"] == trial["best_checkpoint"] == checkpoint(100).uuid
    assert (experiment["state"], experiment["progress"]) == ("COMPLETED", 1)
    assert (experiment["best_trial_id"], experiment["best_validation"]) == (1, 0.25)
    assert experiment["error"] is None
    assert experiment["ended_at"] >= experiment["started_at"] >= experiment["created_at"]
    assert server.work() == []


@on_sqlite
def test_run_started_and_ended_are_idempotent(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.begin()
    for _ in range(2):
        server.exit(spec.run_id, -9, "boom")
    assert server.trial()["restarts"] == 1
    server.exit(spec.run_id, 0)
    assert server.trial()["state"] == "QUEUED"


def test_failed_trial_restarts_from_checkpoint_after_delay(server: Server) -> None:
    server.submit()
    server.add_agent()
    first = server.begin()
    server.report(first.run_id, training(10, 1.0), checkpoint(10), training(15, 0.9))
    server.exit(first.run_id, 1, "rank 0 was killed")
    trial = server.trial()
    assert (trial["state"], trial["restarts"]) == ("QUEUED", 1)
    assert server.work() == []
    server.tick(0.9)
    assert server.work() == []
    server.tick(0.2)
    second = server.begin()
    assert second.restarts == 1
    assert second.latest_checkpoint is not None
    assert second.latest_checkpoint.uuid == checkpoint(10).uuid
    curve = server.get("/trials/1/metrics")["metrics"][0]
    assert curve["points"] == [[10, 1.0]]
    assert server.trial()["steps_completed"] == 10


@on_sqlite
@pytest.mark.parametrize("code", [1, 3, 127])
def test_error_before_first_report_is_not_restarted(server: Server, code: int) -> None:
    server.submit()
    server.add_agent()
    server.exit(server.begin().run_id, code, "FileNotFoundError: metrics/accuracy")
    trial = server.trial()
    assert (trial["state"], trial["restarts"]) == ("ERROR", 0)
    text = "\n".join(line["text"] for line in server.get("/trials/1/logs")["logs"])
    assert "no restart: it failed before its first report" in text


@on_sqlite
@pytest.mark.parametrize("code", [-9, -11, 137, 143, EXIT_INFRASTRUCTURE, EXIT_PREEMPTED])
def test_signal_before_first_report_is_restarted(server: Server, code: int) -> None:
    server.submit()
    server.add_agent()
    server.exit(server.begin().run_id, code, "gone")
    assert server.trial()["state"] == "QUEUED"


def test_error_after_first_report_is_restarted(server: Server) -> None:
    """It is restarted again if the next run fails before its first report."""
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, training(1, 0.5))
    server.exit(spec.run_id, 1, "boom")
    server.tick(2)
    server.exit(server.begin().run_id, 1, "boom")
    assert (server.trial()["state"], server.trial()["restarts"]) == ("QUEUED", 2)


@on_sqlite
def test_task_restarts_up_to_max_restarts(server: Server) -> None:
    server.submit(entrypoint="echo hello", searcher={"name": "single"}, max_restarts=2)
    server.add_agent()
    server.exit(server.begin().run_id, 1, "boom")
    assert server.trial()["restarts"] == 1
    server.submit(entrypoint="echo hello", searcher={"name": "single"})
    server.act("kill", 1)
    server.exit(server.begin(2).run_id, 1, "boom")
    assert server.trial(2)["state"] == "ERROR"


def test_runs_list_nodes_and_exit_reasons(server: Server) -> None:
    server.submit()
    server.add_agent(name="first")
    spec = server.begin()
    server.exit(spec.run_id, -9, "rank 0 exited with code 1: broken")
    server.tick(2)
    server.begin()
    failed, running = server.get("/trials/1/runs")["runs"]
    assert (failed["state"], failed["exit_code"], failed["failed"]) == ("EXITED", -9, True)
    assert failed["reason"] == "rank 0 exited with code 1: broken"
    assert failed["created_at"] <= failed["started_at"] <= failed["ended_at"]
    assert (running["state"], running["exit_code"], running["ended_at"]) == ("RUNNING", None, None)
    assert failed["agents"] == running["agents"] == ["first"]
    assert server.http.get(f"{PREFIX}/trials/9/runs").status_code == 404


@on_sqlite
def test_restart_delay_doubles(server: Server) -> None:
    server.submit()
    server.add_agent()
    for wait in (1, 2, 4, 8, 16):
        server.exit(server.begin().run_id, -9)
        server.tick(wait - 0.1)
        assert server.work() == []
        server.tick(0.2)
        assert len(server.work()) == 1


@on_sqlite
def test_all_trials_failed_is_experiment_error(
    server: Server,
) -> None:
    server.submit(max_restarts=2)
    server.add_agent()
    spec = server.begin()
    server.report(spec.run_id, validation(50, 1.0))
    for number in range(3):
        server.exit(server.begin().run_id, 1, f"failure {number}")
        server.tick(60)
    trial, experiment = server.trial(), server.experiment()
    assert (trial["state"], trial["restarts"], trial["error"]) == ("ERROR", 2, "failure 2")
    assert (experiment["state"], experiment["error"]) == ("ERROR", "failure 2")
    assert experiment["progress"] == 0.5
    text = "\n".join(line["text"] for line in server.get("/trials/1/logs")["logs"])
    assert "failure 0; restart 1 of 2 in 1 s" in text
    assert "failure 2; no restart: it has been restarted 2 times (max_restarts)" in text


@on_sqlite
def test_user_error_is_not_retried(server: Server) -> None:
    server.submit()
    server.add_agent()
    server.exit(server.begin().run_id, EXIT_USER_ERROR, "model_def.py line 3: no such name")
    assert server.trial()["restarts"] == 0
    experiment = server.experiment()
    assert experiment["state"] == "ERROR"
    assert experiment["error"] == "model_def.py line 3: no such name"


@on_sqlite
def test_invalid_hparams_trial_is_replaced(
    server: Server,
) -> None:
    space = {
        "deepspeed_config": "ds_config.json",
        "width": {"type": "int", "minval": 1, "maxval": 9},
    }
    searcher = {"name": "random", "metric": "loss", "max_length": 100, "max_trials": 1}
    server.submit(hyperparameters=space, searcher=searcher)
    server.add_agent()
    server.exit(server.begin().run_id, EXIT_INVALID_HP, "width 3 does not divide")
    first, second = server.trials()
    assert (first["state"], first["error"]) == ("COMPLETED", "width 3 does not divide")
    assert second["state"] == "QUEUED"
    server.exit(server.begin(trial_id=2).run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"


def test_pause_frees_slots_and_activate_resumes(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    assert server.directive(spec.run_id) == "train"
    assert server.act("pause")["state"] == "PAUSED"
    assert server.directive(spec.run_id) == "preempt"
    server.report(spec.run_id, training(30, 1.0), checkpoint(30))
    server.exit(spec.run_id, EXIT_PREEMPTED)
    assert server.trial()["state"] == "PAUSED"
    assert server.work() == []
    assert server.act("activate")["state"] == "ACTIVE"
    again = server.begin()
    assert (again.restarts, server.trial()["state"]) == (0, "RUNNING")
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.steps_completed == 30


@on_sqlite
def test_activate_while_run_is_stopping_restarts_it(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    server.act("pause")
    server.act("activate")
    server.exit(spec.run_id, EXIT_PREEMPTED)
    assert server.begin().run_id != spec.run_id


@on_sqlite
def test_inactive_experiment_starts_no_run(server: Server) -> None:
    server.add_agent()
    assert server.submit(activate=False)["state"] == "PAUSED"
    assert server.work() == []
    assert server.trial()["state"] == "PAUSED"
    server.act("activate")
    assert len(server.work()) == 1


def test_cancel_lets_run_checkpoint(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    assert server.act("cancel")["state"] == "STOPPING_CANCELED"
    assert server.trial()["state"] == "STOPPING"
    assert server.directive(spec.run_id) == "stop"
    assert server.work()[0].action == "run"
    server.report(spec.run_id, checkpoint(40))
    server.exit(spec.run_id, EXIT_PREEMPTED)
    assert (server.trial()["state"], server.experiment()["state"]) == ("CANCELED", "CANCELED")
    assert server.trial()["latest_checkpoint"] == checkpoint(40).uuid


COMMAND = {"entrypoint": ["true"], "hyperparameters": {}}


@on_sqlite
def test_cancel_kills_command_that_never_polls(server: Server) -> None:
    server.submit(**COMMAND)
    server.add_agent()
    spec = server.begin()
    server.act("cancel")
    assert [(item.action, item.grace_s) for item in server.work()] == [("kill", 30.0)]
    (line,) = [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    assert "does not poll for preemption: its processes get SIGTERM" in line
    server.exit(spec.run_id, -15)
    assert (server.trial()["state"], server.trial()["restarts"]) == ("CANCELED", 0)


@on_sqlite
def test_cancel_lets_polling_command_checkpoint(server: Server) -> None:
    server.submit(**COMMAND)
    server.add_agent()
    spec = server.begin()
    assert server.directive(spec.run_id) == "train"
    server.act("cancel")
    assert server.directive(spec.run_id) == "stop"
    assert server.work()[0].action == "run"
    server.act("kill")
    assert server.work()[0].action == "kill"


def test_restarted_command_has_time_to_poll(tmp_path: Path) -> None:
    clock = Clock()
    with serve(tmp_path, clock=clock) as server:
        server.submit(**COMMAND)
        server.add_agent()
        server.directive(server.begin().run_id)
    clock.now += 100
    with serve(tmp_path, clock=clock) as server:
        server.act("cancel")
        assert server.work()[0].action == "run"


@on_sqlite
def test_command_that_never_polls_is_warned(server: Server) -> None:
    server.submit(**COMMAND, preemption_timeout=100)
    server.add_agent()
    server.begin()
    server.act("pause")
    assert server.work()[0].action == "run"
    (line,) = [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    assert "it continues until it is killed, in 100 s (preemption_timeout)" in line
    server.tick(101)
    assert [(item.action, item.grace_s) for item in server.work()] == [("kill", 5.0)]


@on_sqlite
def test_kill_does_not_wait(server: Server) -> None:
    server.submit()
    server.add_agent()
    spec = server.begin()
    assert server.act("kill")["state"] == "STOPPING_KILLED"
    refused = server.http.post("/api/v1/experiments/1/archive")
    assert refused.json()["error"]["message"].endswith(
        "archived; wait until it has ended, then retry"
    )
    assert [(item.run_id, item.action) for item in server.work()] == [(spec.run_id, "kill")]
    server.exit(spec.run_id, -9)
    assert server.experiment()["state"] == "CANCELED"
    assert server.trial()["restarts"] == 0


@on_sqlite
def test_cancel_ends_queued_trials_immediately(server: Server) -> None:
    server.submit()
    assert server.act("cancel")["state"] == "CANCELED"
    assert server.trial()["state"] == "CANCELED"


@pytest.mark.parametrize("action", ["pause", "activate"])
def test_action_on_ended_experiment_names_continue(sqlite_server: Server, action: str) -> None:
    sqlite_server.submit()
    sqlite_server.act("kill")
    response = sqlite_server.http.post(f"/api/v1/experiments/1/{action}")
    assert response.status_code == 409
    message = response.json()["error"]["message"]
    assert "experiment 1: is CANCELED and cannot be" in message
    assert "`zerolab experiment continue 1` continues it" in message


@pytest.mark.parametrize("action", ["cancel", "kill"])
def test_stop_of_ended_experiment_is_noop(sqlite_server: Server, action: str) -> None:
    sqlite_server.submit()
    ended = sqlite_server.act("kill")
    assert sqlite_server.act(action) == ended


@on_sqlite
def test_run_that_misses_deadline_is_killed_not_failed(server: Server) -> None:
    server.submit(preemption_timeout=100)
    server.add_agent()
    spec = server.begin()
    server.act("pause")
    deadline_s = server.get(f"/runs/{spec.run_id}/directive", wait_s=0)["deadline_s"]
    assert deadline_s == 100
    server.tick(99)
    assert server.work()[0].action == "run"
    server.tick(2)
    assert server.work()[0].action == "kill"
    server.exit(spec.run_id, -9)
    trial = server.trial()
    assert (trial["state"], trial["restarts"]) == ("PAUSED", 0)


@on_sqlite
def test_kill_one_trial(server: Server) -> None:
    space = {"deepspeed_config": "ds_config.json", "n": {"type": "categorical", "vals": [1, 2]}}
    server.submit(
        hyperparameters=space, searcher={"name": "grid", "metric": "loss", "max_length": 9}
    )
    server.add_agent(slots=2)
    first, second = server.begin(1), server.begin(2)
    server.post("/trials/1/kill")
    actions = {item.run_id: item.action for item in server.work()}
    assert actions == {first.run_id: "kill", second.run_id: "run"}
    server.exit(first.run_id, -9)
    server.exit(second.run_id, 0)
    assert [trial["state"] for trial in server.trials()] == ["CANCELED", "COMPLETED"]
    assert server.experiment()["state"] == "COMPLETED"


def test_runs_of_silent_agent_restart_elsewhere(
    server: Server,
) -> None:
    server.submit()
    server.add_agent(name="first")
    spec = server.begin()
    server.add_agent(name="second")
    server.services.orchestrator.agents.seen[1] -= GONE_S
    server.tick()
    trial = server.trial()
    assert (trial["state"], trial["restarts"]) == ("QUEUED", 0)
    server.tick(2)
    assert server.begin(agent_id=2).restarts == 0
    response = server.send(spec.run_id, 1, [training(1, 1.0)])
    assert (response.status_code, response.json()["error"]["type"]) == (409, "stale_run")
    states = {agent["name"]: agent["alive"] for agent in server.get("/agents")["agents"]}
    assert states == {"first": False, "second": True}
    assert server.work(agent_id=1) == []
    assert server.get("/agents")["agents"][0]["alive"]


@on_sqlite
def test_machine_failures_do_not_use_restarts(server: Server) -> None:
    server.submit(max_restarts=1)
    server.add_agent()
    for wait in (1, 2, 4, 8):
        server.exit(server.begin().run_id, EXIT_INFRASTRUCTURE, "the agent ended")
        server.tick(wait - 0.1)
        assert server.work() == []
        assert server.trial()["waiting_reason"].endswith("its last run was lost: the agent ended")
        server.tick(0.2)
        assert server.trial()["restarts"] == 0
    server.exit(server.begin().run_id, -9, "boom")
    server.tick(2)
    assert server.trial()["restarts"] == 1
    server.exit(server.begin().run_id, EXIT_INFRASTRUCTURE, "the agent ended")
    server.tick(1.1)  # the delay is the initial one again
    assert server.begin().restarts == 1
    lines = [line["text"] for line in server.get("/trials/1/logs")["logs"]]
    assert "run 4 was lost: the agent ended; it starts again in 8 s, not counted" in lines


def test_log_policy_ends_trial_despite_machine_failure(server: Server) -> None:
    server.submit(log_policies=[{"pattern": "ECC", "action": "cancel_retries"}])
    server.add_agent()
    server.exit(server.begin().run_id, EXIT_INFRASTRUCTURE, "lost", tail="ECC error")
    assert server.trial()["state"] == "ERROR"


@on_sqlite
def test_unstarted_run_of_silent_agent_is_no_failure(server: Server) -> None:
    server.submit()
    server.add_agent(name="first")
    assert len(server.work()) == 1
    server.add_agent(name="second")
    server.services.orchestrator.agents.seen[1] -= GONE_S
    server.tick()
    assert server.trial()["restarts"] == 0
    assert server.begin(agent_id=2).restarts == 0


@on_sqlite
def test_log_policies_label_trial_and_prevent_restart(server: Server) -> None:
    policies = [{"name": "bad data", "pattern": "corrupt .* shard", "action": "cancel_retries"}]
    server.submit(log_policies=policies)
    server.add_agent()
    spec = server.begin()
    server.log(spec.run_id, 0, "RuntimeError: CUDA out of memory. Tried to allocate")
    server.log(spec.run_id, 1, "found a corrupt file shard")
    assert server.trial()["labels"] == ["CUDA OOM", "bad data"]
    server.exit(spec.run_id, 1, "RuntimeError")
    trial = server.trial()
    assert (trial["state"], trial["restarts"]) == ("ERROR", 0)


@on_sqlite
def test_log_policies_search_last_lines_of_failed_run(server: Server) -> None:
    server.submit(log_policies=[{"pattern": "boom", "action": "cancel_retries"}])
    server.add_agent()
    server.exit(server.begin().run_id, 1, "RuntimeError", tail="a\nboom\nb")
    assert server.trial()["state"] == "ERROR"
    assert server.trial()["labels"] == ["boom"]


def test_log_policy_excludes_node(server: Server) -> None:
    server.submit(log_policies=[{"pattern": "ECC", "action": "exclude_node"}])
    server.add_agent(name="first")
    server.add_agent(name="second")
    spec = server.begin(agent_id=1)
    server.log(spec.run_id, 0, "ECC error")
    server.exit(spec.run_id, -9)
    server.tick(2)
    assert server.work(agent_id=1) == []
    assert server.begin(agent_id=2).restarts == 1


@pytest.mark.needs_extension("queue")
def test_higher_priority_experiment_preempts(server: Server) -> None:
    server.submit(name="low")
    server.add_agent()
    low = server.begin()
    server.submit(name="high", resources={"priority": 1})
    assert server.directive(low.run_id) == "preempt"
    server.exit(low.run_id, EXIT_PREEMPTED)
    assert server.trial(1)["state"] == "QUEUED"
    high = server.begin(trial_id=2)
    assert [job["name"] for job in server.get("/jobs")["jobs"]] == ["high", "low"]
    server.exit(high.run_id, 0)
    assert server.begin(trial_id=1).restarts == 0


@pytest.mark.needs_extension("queue")
def test_trial_that_fits_no_agent_has_reason(server: Server) -> None:
    experiment = server.submit(resources={"slots_per_trial": 2})
    assert "no agent is connected" in experiment["waiting_reason"]
    server.add_agent(slots=1)
    reason = server.trial()["waiting_reason"]
    assert "it needs 2 slots on one machine, and there are at most 1" in reason
    assert server.experiment()["waiting_reason"] == reason
    assert server.get("/experiments")["experiments"][0]["waiting_reason"] == reason
    assert [job["waiting_reason"] for job in server.get("/jobs")["jobs"]] == [reason]
    assert server.trials()[0]["waiting_reason"] == reason
    server.add_agent(slots=2)
    assert len(server.work()) == 1
    for row in (server.trial(), server.experiment(), server.get("/jobs")["jobs"][0]):
        assert row["waiting_reason"] is None


def test_queued_trial_reason_names_running_jobs(server: Server) -> None:
    server.add_agent(slots=2)
    server.submit(resources={"slots_per_trial": 2})
    second = server.submit(resources={"slots_per_trial": 2})
    assert second["waiting_reason"] == ("it needs 2 slots on one machine, of which none is free")
    assert server.submit()["waiting_reason"] == "experiment 2 goes first"
    assert server.experiment(1)["waiting_reason"] is None
    server.exit(server.begin(1).run_id, -9)
    assert "has failed and is started again within a minute" in server.trial(1)["waiting_reason"]
    assert server.act("pause", 3)["waiting_reason"] is None


def test_long_queue_reason_counts_earlier_jobs(sqlite_server: Server) -> None:
    numbers = {"n": {"type": "categorical", "vals": list(range(100))}}
    space = {"deepspeed_config": "ds_config.json", **numbers}
    searcher = {"name": "grid", "metric": "loss", "max_length": 100, "max_concurrent_trials": 100}
    sqlite_server.add_agent()
    sqlite_server.submit(hyperparameters=space, searcher=searcher)
    reasons = [trial["waiting_reason"] for trial in sqlite_server.trials()]
    assert reasons[:2] == [None, "it needs 1 slot, of which none is free"]
    assert set(reasons[2:]) == {"earlier trials of its experiment go first"}


def test_rolled_back_submission_has_no_reason(sqlite_server: Server) -> None:
    orchestrator, database = sqlite_server.services.orchestrator, sqlite_server.services.database
    sqlite_server.submit()
    before = orchestrator.queue.waiting

    def fail(work: UnitOfWork) -> None:
        work.save(trials, 1, state="PAUSED")
        work.scheduling.schedule()
        assert orchestrator.queue.waiting != before
        raise ConflictError("not this time")

    with pytest.raises(ConflictError):
        database.write_now(lambda transaction: fail(UnitOfWork(orchestrator, transaction)))
    assert "no agent is connected" in sqlite_server.trial()["waiting_reason"]


def test_archive_and_delete_require_ended_experiment(server: Server) -> None:
    server.submit()
    for method, path in (("POST", "/experiments/1/archive"), ("DELETE", "/experiments/1")):
        assert server.http.request(method, f"/api/v1{path}").status_code == 409
    server.act("kill")
    assert server.act("archive")["archived"]
    assert server.get("/experiments", archived=False)["experiments"] == []
    assert not server.act("unarchive")["archived"]
    server.request("DELETE", "/experiments/1")
    assert server.http.get("/api/v1/experiments/1").status_code == 404
    for table in ("experiments", "trials", "runs", "points", "rollups", "logs", "checkpoints"):
        assert server.sql(f"SELECT count(*) FROM {table}") == [(0,)]
    assert list(server.services.orchestrator.home.archives.iterdir()) == []


def test_fork_copies_experiment_with_changes(server: Server) -> None:
    server.submit()
    fork = server.post("/experiments/1/fork", {"config": {"searcher": {"max_length": 7}}})
    fork = fork["experiment"]
    assert (fork["id"], fork["forked_from"], fork["state"]) == (2, 1, "ACTIVE")
    assert fork["config"]["searcher"]["max_length"] == {"batches": 7}
    assert fork["config"]["searcher"]["metric"] == "loss"
    response = server.http.post("/api/v1/experiments/1/fork", json={"config": {"nmae": 1}})
    assert response.status_code == 422
    assert "nmae" in response.json()["error"]["problems"][0]


def test_retention_never_removes_latest_checkpoint(
    server: Server,
) -> None:
    storage = {"save_trial_best": 1, "save_trial_latest": 1}
    server.submit(checkpoint_storage=storage)
    server.add_agent()
    spec = server.begin()
    root = server.services.orchestrator.home.checkpoints
    for steps in (10, 20, 30, 40):
        (root / checkpoint(steps).uuid).mkdir()

    def kept_steps() -> list[int]:
        rows = server.get("/trials/1/checkpoints", state="COMPLETED")["checkpoints"]
        return [row["steps_completed"] for row in rows]

    server.report(spec.run_id, checkpoint(10))
    server.report(spec.run_id, validation(20, 0.1), checkpoint(20))
    assert kept_steps() == [20]
    server.report(spec.run_id, validation(30, 0.5), checkpoint(30))
    server.report(spec.run_id, checkpoint(40))
    assert kept_steps() == [20, 40]
    assert server.trial()["best_checkpoint"] == checkpoint(20).uuid
    server.exit(spec.run_id, -9)
    assert server.trial()["latest_checkpoint"] == checkpoint(40).uuid
    server.services.orchestrator.janitor.close()
    remaining = {checkpoint(20).uuid, checkpoint(40).uuid}
    assert {path.name for path in root.iterdir()} == remaining


@on_sqlite
def test_clock_set_back_delays_no_deadline(server: Server) -> None:
    server.submit(preemption_timeout=100)
    server.add_agent()
    server.clock.set_back = -86_400.0  # before the delay begins
    server.exit(server.begin().run_id, -9)
    server.clock.set_back = 86_400.0
    server.tick(2)
    spec = server.begin()
    server.act("pause")
    server.clock.set_back = 2 * 86_400.0
    server.tick(90)
    directive = server.get(f"/runs/{spec.run_id}/directive", wait_s=0)
    assert directive["deadline_s"] == pytest.approx(10)
    server.tick(11)
    assert server.work()[0].action == "kill"


def test_start_with_earlier_clock_adds_no_delay(
    tmp_path: Path,
) -> None:
    with serve(tmp_path) as server:
        server.submit(preemption_timeout=100)
        server.submit(preemption_timeout=100)
        server.add_agent(slots=2)
        server.exit(server.begin(1).run_id, -9)
        server.begin(2)
        server.act("pause", 2)
    earlier = Clock()
    earlier.now -= 86_400.0
    with serve(tmp_path, clock=earlier) as server:
        agent_id = server.add_agent(slots=2)
        server.tick(server.services.settings.timings.backoff_most_s)
        assert server.run_of(1, agent_id).action == "run"
        server.tick(101)
        assert server.run_of(2, agent_id).action == "kill"
