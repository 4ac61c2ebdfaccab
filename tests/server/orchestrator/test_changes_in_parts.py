"""A pause, activation, cancel or kill of many trials is split into several changes."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.server.helpers import Server, experiment_config, model_archive, serve
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.contract.spec import EXIT_PREEMPTED
from zeroserver.orchestrator import experiment_service, lifecycle
from zeroserver.services import Services

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
RANDOM = {
    "name": "random", "metric": "loss", "max_length": 10, "max_trials": 7,
    "max_concurrent_trials": 7,
}  # fmt: skip
ENDS = {"pause": "PAUSED", "activate": "QUEUED", "cancel": "CANCELED", "kill": "CANCELED"}
"""Action to the state of trials without a run after it."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one change move a few trials."""
    monkeypatch.setattr(lifecycle, "_IDLE_AT_ONCE", 2)
    monkeypatch.setattr(experiment_service, "_RUNS_AT_ONCE", 2)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server stop after the first change of an action."""

    async def no_effects(_services: Services) -> None:
        pass

    monkeypatch.setattr(Services, "apply_states", no_effects)


def states(server: Server) -> Counter[str]:
    return Counter(state for (state,) in server.sql("SELECT state FROM trials"))


def act_in_part(server: Server, *actions: str) -> None:
    """Make the first change of each action only."""
    for action in actions:
        server.write(lambda work, action=action: work.experiments.act(1, action))


def continue_parts(server: Server) -> int:
    """Make the remaining changes; return their number."""
    changes = 0
    while server.services.orchestrator.queue.unapplied:
        server.write(lambda work: work.experiments.apply_state(1))
        changes += 1
        check_counts(server)
    return changes


def check_counts(server: Server) -> None:
    experiment = server.experiment()
    assert experiment["num_trials"] == 7
    assert experiment["canceled_trials"] == states(server)["CANCELED"]
    if experiment["state"] in {"CANCELED", "COMPLETED", "ERROR"}:
        assert states(server).keys() <= {"CANCELED", "COMPLETED", "ERROR"}


def submit(server: Server, action: str = "") -> None:
    server.submit(hyperparameters=SPACE, searcher=RANDOM, activate=action != "activate")


@pytest.mark.parametrize("action", ENDS)
def test_action_is_split(server: Server, action: str) -> None:
    submit(server, action)
    before = server.services.database.jobs
    experiment = server.act(action)
    assert server.services.database.jobs - before >= 4
    assert states(server) == {ENDS[action]: 7}
    assert experiment["state"] == ("ACTIVE" if action == "activate" else ENDS[action])
    check_counts(server)
    assert server.services.orchestrator.queue.unapplied == set()


@pytest.mark.parametrize("action", ENDS)
def test_states_between_parts(server: Server, interrupted: None, action: str) -> None:
    submit(server, action)
    before = "PAUSED" if action == "activate" else "QUEUED"
    act_in_part(server, action)
    assert states(server) == {ENDS[action]: 2, before: 5}
    check_counts(server)
    experiment = server.experiment()
    assert experiment["ended_at"] is None
    if action in {"cancel", "kill"}:
        assert experiment["state"].startswith("STOPPING_")
        assert server.http.delete("/api/v1/experiments/1").status_code == 409
    server.act(action)  # repeating it changes nothing
    assert states(server) == {ENDS[action]: 2, before: 5}
    assert continue_parts(server) == 3
    assert states(server) == {ENDS[action]: 7}


@pytest.mark.parametrize(
    "actions",
    [
        ("pause", "activate"),
        ("pause", "activate", "pause"),
        ("pause", "kill"),
        ("pause", "cancel"),
        ("pause", "activate", "cancel"),
        ("cancel", "kill"),
    ],
)
def test_action_during_unfinished_action(
    server: Server, interrupted: None, actions: Sequence[str]
) -> None:
    submit(server)
    act_in_part(server, *actions)
    continue_parts(server)
    assert states(server) == {ENDS[actions[-1]]: 7}
    if actions[-1] in {"kill", "cancel"}:
        assert server.experiment()["state"] == "CANCELED"
        server.request("DELETE", "/experiments/1")


def test_unfinished_pause_starts_nothing(server: Server, interrupted: None) -> None:
    submit(server)
    act_in_part(server, "pause")
    server.add_agent(slots=7)
    server.tick()
    assert server.work() == []
    act_in_part(server, "activate")
    server.tick()
    assert len(server.work()) == 7 - states(server)["PAUSED"]
    continue_parts(server)
    server.tick()
    assert len(server.work()) == 7


@pytest.mark.parametrize("action", ["pause", "cancel", "kill"])
def test_runs_are_directed_in_parts(server: Server, interrupted: None, action: str) -> None:
    submit(server)
    server.add_agent(slots=7)
    run_ids = [item.run_id for item in server.work()]
    assert len(run_ids) == 7
    act_in_part(server, action)
    query = "SELECT count(*) FROM runs WHERE directive <> 'train' OR killed = 1"
    assert server.sql(query) == [(2,)]
    server.exit(run_ids[-1], EXIT_PREEMPTED)  # one that did not know of it
    assert states(server)["PAUSED"] == 1
    continue_parts(server)
    assert server.sql(query + " AND state <> 'EXITED'") != [(0,)]
    for run_id in run_ids[:-1]:
        if action != "kill":
            assert server.directive(run_id) == ("preempt" if action == "pause" else "stop")
        server.exit(run_id, EXIT_PREEMPTED)
    assert states(server) == {ENDS[action]: 7}
    assert server.experiment()["state"] == ENDS[action]


@pytest.mark.needs_extension("continued_experiments")
def test_searcher_gets_each_event_once(server: Server, interrupted: None) -> None:
    submit(server)
    server.add_agent(slots=2)
    first = server.begin().run_id
    act_in_part(server, "pause", "activate", "kill")
    server.exit(first, 0)
    continue_parts(server)
    for item in server.work():
        server.exit(item.run_id, EXIT_PREEMPTED)
    assert server.experiment()["state"] == "CANCELED"
    server.post("/experiments/1/continue", {})
    server.act("kill")
    continue_parts(server)
    repeated = "GROUP BY kind, request_id HAVING count(*) > 1"
    assert not server.sql(f"SELECT kind, request_id FROM searcher_events {repeated}")


@pytest.mark.parametrize("action", ENDS)
def test_next_server_continues(
    tmp_path: Path, interrupted: None, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    with serve(tmp_path) as server:
        submit(server, action)
        act_in_part(server, action)
        assert states(server)[ENDS[action]] == 2
    monkeypatch.undo()
    with serve(tmp_path) as server:
        until("it continues", lambda: states(server) == {ENDS[action]: 7})
        until("it is applied", lambda: not server.services.orchestrator.queue.unapplied)
        check_counts(server)


DIES_BETWEEN_PARTS = """
import os, signal, sys
import zeroserver.process
from zeroserver import services
from zeroserver.orchestrator import experiment_service, lifecycle

async def die(services):
    if services.orchestrator.queue.unapplied:
        os.kill(os.getpid(), signal.SIGKILL)

lifecycle._IDLE_AT_ONCE = 2
services.Services.apply_states = die
sys.exit(zeroserver.process.main())
"""


@pytest.mark.processes
@pytest.mark.parametrize("action", ["pause", "kill"])
def test_killed_server_continues(tmp_path: Path, action: str) -> None:
    server = LiveServer(tmp_path / "home")
    server._program = ["-c", DIES_BETWEEN_PARTS]
    server.start()
    try:
        client = server.client()
        config = experiment_config(hyperparameters=SPACE, searcher=RANDOM)
        client.create_experiment(config, model_archive(tmp_path / "model"))
        url = f"{server.url}/api/v1/experiments/1/{action}"
        with pytest.raises(httpx.TransportError):
            httpx.post(url, headers={"Authorization": f"Bearer {server.token}"}, timeout=DEADLINE_S)
        server.kill()
        server._program = []
        server.start()
        client = server.client()
        until(
            "it continues",
            lambda: Counter(trial["state"] for trial in client.trials(1)),
            lambda counts: counts == {ENDS[action]: 7},
        )
        experiment = client.experiment(1)
        assert experiment["state"] == ENDS[action]
        assert experiment["canceled_trials"] == (7 if action == "kill" else 0)
    finally:
        server.close()
