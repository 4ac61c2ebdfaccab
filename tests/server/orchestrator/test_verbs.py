"""Every action in every state, each sent twice, against tables written by hand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.helpers import PREFIX, Server, checkpoint, serve, validation
from tests.waiting import until
from zerolab.contract.messages import RunExit
from zerolab.contract.spec import EXIT_PREEMPTED

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "double", "minval": 0, "maxval": 1},
}
SAME = "same"
REFUSED = "refused"

EXPERIMENTS: dict[str, dict[str, str]] = {
    "ACTIVE": {
        "pause": "PAUSED", "activate": SAME, "continue": SAME, "archive": REFUSED,
        "unarchive": SAME, "cancel": "STOPPING_CANCELED", "kill": "STOPPING_KILLED",
        "delete": REFUSED, "fork": SAME,
    },
    "PAUSED": {
        "pause": SAME, "activate": "ACTIVE", "continue": REFUSED, "archive": REFUSED,
        "unarchive": SAME, "cancel": "CANCELED", "kill": "CANCELED", "delete": REFUSED,
        "fork": SAME,
    },
    "STOPPING_CANCELED": {
        "pause": REFUSED, "activate": REFUSED, "continue": REFUSED, "archive": REFUSED,
        "unarchive": SAME, "cancel": SAME, "kill": "STOPPING_KILLED", "delete": REFUSED,
        "fork": SAME,
    },
    "STOPPING_KILLED": {
        "pause": REFUSED, "activate": REFUSED, "continue": REFUSED, "archive": REFUSED,
        "unarchive": SAME, "cancel": SAME, "kill": SAME, "delete": REFUSED, "fork": SAME,
    },
    "COMPLETED": {
        "pause": REFUSED, "activate": REFUSED, "continue": REFUSED, "archive": SAME,
        "unarchive": SAME, "cancel": SAME, "kill": SAME, "delete": "gone", "fork": SAME,
    },
    "CANCELED": {
        "pause": REFUSED, "activate": REFUSED, "continue": "ACTIVE", "archive": SAME,
        "unarchive": SAME, "cancel": SAME, "kill": SAME, "delete": "gone", "fork": SAME,
    },
    "ERROR": {
        "pause": REFUSED, "activate": REFUSED, "continue": "ACTIVE", "archive": SAME,
        "unarchive": SAME, "cancel": SAME, "kill": SAME, "delete": "gone", "fork": SAME,
    },
}  # fmt: skip

TRIALS: dict[str, dict[str, str]] = {
    "QUEUED": {
        "pause": "PAUSED", "activate": SAME, "continue": SAME, "cancel": "CANCELED",
        "kill": "CANCELED", "fork": SAME, "archive": REFUSED, "unarchive": SAME,
        "delete": REFUSED,
    },
    "RUNNING": {
        "pause": SAME, "activate": SAME, "continue": SAME, "cancel": "STOPPING",
        "kill": "STOPPING", "fork": SAME, "archive": REFUSED, "unarchive": SAME,
        "delete": REFUSED,
    },
    "PAUSED": {
        "pause": SAME, "activate": "QUEUED", "continue": REFUSED, "cancel": "CANCELED",
        "kill": "CANCELED", "fork": SAME, "archive": REFUSED, "unarchive": SAME,
        "delete": REFUSED,
    },
    "STOPPING": {
        "pause": REFUSED, "activate": REFUSED, "continue": REFUSED, "cancel": SAME, "kill": SAME,
        "fork": SAME, "archive": REFUSED, "unarchive": SAME,
        "delete": REFUSED,
    },
    "COMPLETED": {
        "pause": REFUSED, "activate": REFUSED, "continue": REFUSED, "cancel": SAME, "kill": SAME,
        "fork": SAME, "archive": SAME, "unarchive": SAME,
        "delete": REFUSED,
    },
    "CANCELED": {
        "pause": REFUSED, "activate": REFUSED, "continue": "QUEUED", "cancel": SAME, "kill": SAME,
        "fork": SAME, "archive": SAME, "unarchive": SAME,
        "delete": REFUSED,
    },
    "ERROR": {
        "pause": REFUSED, "activate": REFUSED, "continue": "QUEUED", "cancel": SAME, "kill": SAME,
        "fork": SAME, "archive": SAME, "unarchive": SAME,
        "delete": REFUSED,
    },}  # fmt: skip


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with one large agent that is never lost."""
    with serve(tmp_path) as running:
        running.add_agent(slots=500)
        yield running


def submit_single(server: Server, **changes: Any) -> tuple[int, int]:
    """Submit an experiment of one trial; return both ids."""
    number = server.submit(**{"max_restarts": 0, **changes})["id"]
    return number, server.trials(number)[0]["id"]


def start_and_save(server: Server, trial_id: int) -> int:
    """Start a trial's run and save a checkpoint; return the run's id."""
    run_id = server.begin(trial_id).run_id
    server.report(run_id, validation(5, 0.5), checkpoint(5, f"{trial_id} {run_id}"))
    return run_id


def experiment_in(server: Server, state: str) -> int:
    """Submit an experiment and bring it into a state; return its id."""
    number, trial_id = submit_single(server, activate=state != "PAUSED")
    if state == "PAUSED":
        return number
    run_id = start_and_save(server, trial_id)
    if state in {"STOPPING_CANCELED", "STOPPING_KILLED", "CANCELED"}:
        server.act("kill" if state == "STOPPING_KILLED" else "cancel", number)
    if state in {"COMPLETED", "CANCELED", "ERROR"}:
        server.exit(run_id, {"COMPLETED": 0, "CANCELED": EXIT_PREEMPTED, "ERROR": 1}[state], "boom")
    return number


def bring_trial_to(server: Server, trial_id: int, state: str) -> None:
    """Bring a queued trial into a state."""
    run_id = start_and_save(server, trial_id)
    verb = {"PAUSED": "pause", "QUEUED": "pause", "STOPPING": "cancel", "CANCELED": "cancel"}
    if state in verb:
        server.post(f"/trials/{trial_id}/{verb[state]}")
    code = {"PAUSED": EXIT_PREEMPTED, "CANCELED": EXIT_PREEMPTED, "COMPLETED": 0, "ERROR": 1}
    if state in code:
        server.exit(run_id, code[state], "boom")
    if state == "QUEUED":  # it waits for its restart delay
        server.exit(run_id, 1, "boom")
        server.post(f"/trials/{trial_id}/activate")


def act_twice(server: Server, kind: str, number: int, verb: str, expected: str) -> None:
    """Send an action twice and check that it took effect once."""
    resource = f"/{kind}s/{number}"
    before = server.get(resource)[kind]

    def ask() -> Any:
        if verb == "delete":
            return server.http.delete(PREFIX + resource)
        return server.http.post(f"{PREFIX}{resource}/{verb}")

    response, state = ask(), before["state"]
    context = f"{kind} {state} {verb}: {response.status_code} {response.text}"
    if expected == REFUSED:
        assert response.status_code == 409, context
        assert server.get(resource)[kind] == before, context
        return
    assert response.is_success, context
    if expected == "gone":
        assert ask().status_code == 404
        assert server.http.get(PREFIX + resource).status_code == 404
        return
    after = server.get(resource)[kind]
    assert after["state"] == (state if expected == SAME else expected), context
    assert verb not in {"archive", "unarchive"} or after["archived"] == (verb == "archive")
    if verb == "fork":
        assert after == before
        assert response.json()["experiment"]["id"] != number
        return
    again = ask()
    assert again.is_success, f"again: {context}, then {again.text}"
    assert server.get(resource)[kind] == after, context


@pytest.mark.slow
@pytest.mark.parametrize("state", EXPERIMENTS)
def test_experiment_verbs_in_each_state(server: Server, state: str) -> None:
    assert len(EXPERIMENTS[state]) == 9
    for verb, expected in EXPERIMENTS[state].items():
        number = experiment_in(server, state)
        assert server.experiment(number)["state"] == state
        act_twice(server, "experiment", number, verb, expected)


@pytest.mark.slow
@pytest.mark.parametrize("state", TRIALS)
def test_trial_verbs_in_each_state(server: Server, state: str) -> None:
    assert len(TRIALS[state]) == 9
    searcher = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 10}
    restarts = int(state == "QUEUED")
    server.submit(hyperparameters=SPACE, searcher=searcher, max_restarts=restarts)
    for trial_id, (verb, expected) in enumerate(TRIALS[state].items(), 1):
        bring_trial_to(server, trial_id, state)
        assert server.trial(trial_id)["state"] == state
        act_twice(server, "trial", trial_id, verb, expected)
        if verb == "delete" and state in {"COMPLETED", "CANCELED", "ERROR"}:
            refused = server.http.delete(f"{PREFIX}/trials/{trial_id}").json()["error"]["message"]
            assert refused == (
                f"trial {trial_id}: its experiment 1 is ACTIVE, and the searcher still counts on "
                f"it; `zerolab trial archive {trial_id}` hides it until that has ended"
            )
        if expected == "QUEUED" and verb in {"activate", "continue"}:
            spec = server.begin(trial_id)
            assert spec.latest_checkpoint is not None
            assert (spec.latest_checkpoint.steps_completed, spec.restarts) == (5, 0)


def test_later_stop_request_only_escalates(
    server: Server,
) -> None:
    number, trial_id = submit_single(server, preemption_timeout=100)
    run_id = start_and_save(server, trial_id)
    start = server.clock.now

    def deadline() -> Any:
        return server.sql(f"SELECT directive, killed, deadline_at - {start} FROM runs")[0]

    server.act("pause", number)
    assert deadline() == ("preempt", 0, 100)
    server.tick(50)
    server.act("cancel", number)  # it is stopping already: no new deadline
    assert deadline() == ("stop", 0, 100)
    assert server.http.post(f"{PREFIX}/trials/{trial_id}/pause").status_code == 409
    assert deadline() == ("stop", 0, 100)
    server.act("kill", number)
    assert deadline() == ("stop", 1, 100)
    (killed_at,) = server.sql("SELECT killed_at FROM runs")
    server.tick(5)
    server.act("kill", number)
    server.post(f"/trials/{trial_id}/kill")
    assert server.sql("SELECT killed_at FROM runs") == [killed_at]
    server.exit(run_id, -9)
    assert (server.trial()["state"], server.experiment()["state"]) == ("CANCELED", "CANCELED")


@pytest.mark.parametrize("verb", ["cancel", "kill"])
def test_kill_while_stopping_ends_processes(server: Server, verb: str) -> None:
    number, trial_id = submit_single(server)
    start_and_save(server, trial_id)
    server.post(f"/trials/{trial_id}/cancel")
    assert [item.action for item in server.work()] == ["run"]
    server.act(verb, number)
    assert [item.action for item in server.work()] == ["run" if verb == "cancel" else "kill"]
    server.post(f"/trials/{trial_id}/kill")
    assert [item.action for item in server.work()] == ["kill"]


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (1, "ERROR")])
def test_trial_ends_in_paused_experiment(server: Server, code: int, state: str) -> None:
    number, trial_id = submit_single(server)
    run_id = start_and_save(server, trial_id)
    server.act("pause", number)
    server.exit(run_id, code, "boom")
    assert (server.trial()["state"], server.experiment()["state"]) == (state, state)


@pytest.mark.needs_extension("continued_experiments")
@pytest.mark.parametrize("code", [0, 1, EXIT_PREEMPTED])
def test_continue_paused_in_each_terminal_state(server: Server, code: int) -> None:
    number, trial_id = submit_single(server)
    run_id = start_and_save(server, trial_id)
    if code == EXIT_PREEMPTED:
        server.act("cancel", number)
    server.exit(run_id, code, "boom")
    server.act("archive", number)
    body = {"config": {"searcher": {"max_length": 2000}}, "activate": False}
    for _ in range(2 if code else 1):
        going = server.http.post(f"{PREFIX}/experiments/{number}/continue", json=body)
        if going.status_code == 409:  # the next GET shows it as paused
            assert "`zerolab experiment activate" in going.text
    experiment, trial = server.experiment(), server.trial()
    assert (experiment["state"], trial["state"]) == ("PAUSED", "PAUSED")
    assert not experiment["archived"]
    for row in (experiment, trial):
        assert (row["ended_at"], row["error"]) == (None, None)
    assert server.work() == []
    server.act("activate", number)
    server.exit(start_and_save(server, trial_id), 0)  # no field of the previous end remains
    assert (server.trial()["state"], server.experiment()["state"]) == ("COMPLETED", "COMPLETED")


def test_continue_clears_pause_of_trial(
    server: Server,
) -> None:
    searcher = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 2}
    server.submit(hyperparameters=SPACE, searcher=searcher, max_restarts=0)
    run_id = start_and_save(server, 1)
    server.post("/trials/1/pause")
    server.exit(run_id, EXIT_PREEMPTED)
    server.post("/trials/1/cancel")
    server.post("/trials/1/continue")
    spec = server.begin(1)
    assert spec.latest_checkpoint is not None
    server.exit(spec.run_id, EXIT_PREEMPTED)  # for another one, which no pause is
    assert server.trial(1)["state"] == "QUEUED"


def test_continued_trial_waits_in_paused_experiment(server: Server) -> None:
    searcher = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 2}
    server.submit(hyperparameters=SPACE, searcher=searcher, max_restarts=0)
    server.exit(start_and_save(server, 1), 1, "boom")
    server.act("pause")
    server.post("/trials/1/continue")
    trial = server.trial(1)
    assert (trial["state"], trial["error"], trial["ended_at"]) == ("PAUSED", None, None)
    server.act("activate")
    assert server.trial(1)["state"] == "QUEUED"


def test_continue_trial_unarchives_experiment(server: Server) -> None:
    _, trial_id = submit_single(server)
    server.exit(start_and_save(server, trial_id), 1, "boom")
    server.act("archive")
    server.post(f"/trials/{trial_id}/continue")
    experiment = server.experiment()
    assert (experiment["state"], experiment["archived"]) == ("ACTIVE", False)
    assert (experiment["ended_at"], experiment["error"]) == (None, None)


def test_end_of_trial_cancels_pending_restart(server: Server) -> None:
    ends: list[Callable[[], Any]] = [
        lambda: server.post("/trials/1/kill"),
        lambda: server.act("kill"),
    ]
    _, trial_id = submit_single(server, max_restarts=5)
    for end in ends:
        server.exit(start_and_save(server, trial_id), 1, "boom")
        assert server.trial()["restarts"] == 1
        end()
        assert server.trial()["state"] == "CANCELED"
        server.post("/trials/1/continue")
        assert server.begin(trial_id).restarts == 0  # at once, and with all its restarts
        server.exit(server.run_of(trial_id).run_id, EXIT_PREEMPTED)


def test_delete_experiment_keeps_shared_files(server: Server) -> None:
    number, trial_id = submit_single(server)
    server.exit(start_and_save(server, trial_id), 0)
    other = server.post(f"/experiments/{number}/fork")["experiment"]["id"]
    home = server.services.orchestrator.home
    ((uuid,),) = server.sql("SELECT uuid FROM checkpoints")
    weights = home.checkpoints / uuid / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"of the one that goes")
    assert len(list(home.archives.iterdir())) == 1
    server.request("DELETE", f"/experiments/{number}")
    until("the weights go", lambda: not weights.exists())
    assert len(list(home.archives.iterdir())) == 1, "the fork has the same"
    assert server.sql("SELECT count(*) FROM searcher_events WHERE experiment_id = 1") == [(0,)]
    server.act("kill", other)


@pytest.mark.needs_extension("continued_experiments", "model_registry")
def test_delete_trial_keeps_shared_checkpoints(
    server: Server,
) -> None:
    searcher = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": 3}
    server.submit(hyperparameters=SPACE, searcher=searcher)
    for trial_id, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        run_id = server.begin(trial_id).run_id
        server.report(run_id, validation(20, loss), checkpoint(20, str(trial_id)))
        server.log(run_id, 0, "a line")
        server.exit(run_id, 0)
    shared = checkpoint(20, "1").uuid
    weights = server.services.orchestrator.home.checkpoints / shared / "weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"of the one that goes")
    by_lr = server.get("/experiments/1/trials", sort="hparams.lr")["trials"]

    def refused() -> str:
        response = server.http.delete(f"{PREFIX}/trials/1")
        assert response.status_code == 409
        assert server.get("/experiments/1/trials", sort="hparams.lr")["trials"] == by_lr
        message: str = response.json()["error"]["message"]
        return message

    server.post("/models", {"name": "good"})
    server.post("/models/good/versions", {"checkpoint": shared})
    assert "is version 1 of model good; `zerolab model delete-version good 1`" in refused()
    server.request("DELETE", "/models/good/versions/1")
    fork = server.post("/trials/1/fork", {"activate": False})["experiment"]["id"]
    assert f"whose weights are needed by experiment {fork}" in refused()
    server.act("kill", fork)

    server.request("DELETE", "/trials/1")
    until("the weights go", lambda: not weights.exists())
    for table in ("points", "rollups", "logs", "checkpoints", "runs"):
        trial_ids = server.sql(f"SELECT DISTINCT trial_id FROM {table} ORDER BY 1")
        assert trial_ids == [(2,), (3,)], table
    experiment = server.experiment()
    assert (experiment["num_trials"], experiment["best_trial_id"]) == (2, 3)
    assert experiment["best_validation"] == 0.2
    page = server.get("/experiments/1/trials", sort="hparams.lr")
    assert (page["trials"], page["total"]) == ([row for row in by_lr if row["id"] != 1], 2)

    server.post("/trials/2/archive")
    for more in ({}, {"where": '[["steps_completed", ">", 0]]'}):
        page = server.get("/experiments/1/trials", archived=False, **more)
        assert ([row["id"] for row in page["trials"]], page["total"]) == ([3], 1)
    body = {"config": {"searcher": {"max_trials": 4, "max_length": 40}}}
    server.post("/experiments/1/continue", body)
    rows = [(row["id"], row["state"], row["archived"]) for row in server.trials()]
    newest = rows[-1][0]  # the fourth, and not the first once more
    assert rows == [(number, "QUEUED", False) for number in (2, 3, newest)]
    assert server.sql("SELECT request_id FROM trials WHERE experiment_id = 1 ORDER BY id") == [
        (2,), (3,), (4,)
    ]  # fmt: skip


def test_delete_cleans_several_agents(server: Server) -> None:
    agents = [server.add_agent(name=name, pool="two") for name in ("a", "b")]
    resources = {"slots_per_trial": 2, "max_nodes": 2, "resource_pool": "two"}
    number, trial_id = submit_single(server, resources=resources)
    run_id = server.begin(trial_id, agents[0]).run_id
    for node in range(2):
        server.post(f"/runs/{run_id}/exited", msgspec.to_builtins(RunExit(0, node=node)))
    assert server.sql("SELECT count(*) FROM run_nodes") == [(2,)]
    server.request("DELETE", f"/experiments/{number}")
    for table in ("experiments", "trials", "runs", "run_nodes"):
        assert server.sql(f"SELECT count(*) FROM {table}") == [(0,)], table


@pytest.mark.needs_extension("checkpoint_removal")
def test_continue_uses_previous_checkpoint_if_deleted(
    server: Server,
) -> None:
    _, trial_id = submit_single(server, checkpoint_storage={"save_trial_latest": 2})
    run_id = start_and_save(server, trial_id)
    newest = checkpoint(9)
    server.report(run_id, validation(9, 0.4), newest)
    server.exit(run_id, 1, "boom")
    server.request("DELETE", f"/checkpoints/{newest.uuid}")
    server.post(f"/trials/{trial_id}/continue")
    begins_with = server.begin(trial_id).latest_checkpoint
    assert begins_with is not None
    assert begins_with.steps_completed == 5
