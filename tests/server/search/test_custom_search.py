"""Custom searchers outside of the server: events and operations over REST."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from tests.server.helpers import Server, on_sqlite, serve, validation
from tests.server.processes import played
from tests.waiting import DEADLINE_S, until
from zerolab.client import search as search_program
from zerolab.extensions.search_client import _plain
from zerolab.searcher import Create, Operation, Shutdown

SPACE = {"deepspeed_config": "ds_config.json"}
CUSTOM: dict[str, Any] = {"name": "custom", "metric": "loss", "max_length": 100}
PATH = "/experiments/1/searcher"


def create(trial_id: int, **more: Any) -> dict[str, Any]:
    return {"kind": "create", "trial_id": trial_id, "hparams": {"lr": 0.1}, **more}


def send(server: Server, after: int, handled: int, *operations: dict[str, Any]) -> Any:
    body = {"after": after, "handled": handled, "operations": list(operations), "progress": 0.25}
    return server.http.post(f"/api/v1{PATH}/operations", json=body)


@pytest.fixture
def search(server: Server) -> Server:
    server.submit(hyperparameters=SPACE, searcher=CUSTOM)
    server.add_agent(slots=2)
    return server


def reasons(server: Server) -> tuple[str | None, str | None]:
    """Return the reasons why the experiment has no run and no further trial."""
    (job,) = server.get("/jobs")["jobs"]
    return server.experiment()["waiting_reason"], job["waiting_reason"]


def test_operations_run_once_and_send_events(search: Server) -> None:
    unserved, also = reasons(search)
    assert unserved == also
    assert "zerolab.client.search.serve(client, 1, MySearch)" in str(unserved)
    assert search.get(f"{PATH}/events") == {"events": [], "handled": -1, "over": False}
    search.tick()
    assert reasons(search) == (None, None)
    first = [create(7), {"kind": "continue", "trial_id": 7, "until": 10}, create(3)]
    for _ in range(2):  # the second time has no effect
        assert send(search, -1, 0, *first).json() == {"handled": 0}
    assert [trial["hparams"] for trial in search.trials()] == [{"lr": 0.1}] * 2
    assert search.experiment()["progress"] == 0.25
    spec = search.begin(1)
    assert spec.fit is not None
    assert spec.fit.until == 10
    search.report(spec.run_id, validation(10, "NaN"))
    assert search.directive(spec.run_id) == "preempt"
    search.tick(61)
    assert reasons(search) == (None, unserved)
    page = search.get(f"{PATH}/events")
    events = [(event["kind"], event["trial_id"], event["metric"]) for event in page["events"]]
    assert events == [("created", 7, None), ("created", 3, None), ("validated", 7, "NaN")]
    last = page["events"][-1]["id"]
    assert search.get(f"{PATH}/events", after=last)["events"] == []
    stops = [{"kind": "stop", "trial_id": 7}, {"kind": "stop", "trial_id": 3}]
    assert send(search, 0, last, *stops, {"kind": "shutdown"}).status_code == 200
    search.exit(spec.run_id, 66)
    search.exit(search.begin(2).run_id, 66)
    assert search.experiment()["state"] == "COMPLETED"
    assert search.get(f"{PATH}/events")["over"]
    assert search.get(PATH)["searcher"]["brackets"] == []


def test_shutdown_after_last_trial_completes_the_experiment(search: Server) -> None:
    send(search, -1, 0, create(1))
    search.exit(search.begin().run_id, 0)
    last = search.get(f"{PATH}/events")["events"][-1]["id"]
    assert send(search, 0, last, {"kind": "shutdown"}).is_success
    experiment = search.experiment()
    assert (experiment["state"], experiment["progress"]) == ("COMPLETED", 1.0)
    orchestrator = search.services.orchestrator
    assert not orchestrator.searches.searchers
    assert not orchestrator.configs.configs


def test_restart_keeps_answered_events(tmp_path: Any) -> None:
    with serve(tmp_path) as server:
        server.submit(hyperparameters=SPACE, searcher=CUSTOM)
        send(server, -1, 0, create(1))
    with serve(tmp_path) as server:
        page = server.get(f"{PATH}/events")
        assert page["handled"] == 0
        assert [event["kind"] for event in page["events"]] == ["created"]
        assert send(server, -1, 0, create(2)).json() == {"handled": 0}
        assert len(server.trials()) == 1


def test_restart_gives_program_a_grace_period(
    tmp_path: Any,
) -> None:
    with serve(tmp_path) as server:
        server.submit(hyperparameters=SPACE, searcher=CUSTOM)
        unserved, _ = reasons(server)
        assert unserved  # immediately: the program has not seen the event
        server.get(f"{PATH}/events")
    with serve(tmp_path) as server:
        server.tick()  # the first one
        assert reasons(server) == (None, None)
        server.tick(61)
        assert reasons(server) == (unserved, unserved)


class OneTrial:
    """Searcher that shuts down when its only trial has ended."""

    def __init__(self, *_: Any) -> None:
        pass

    def initial_operations(self) -> list[Operation]:
        return [Create(1, {"lr": 0.1}, 0)]

    def trial_created(self, _trial_id: int) -> list[Operation]:
        return []

    def trial_exited_early(self, _trial_id: int, _reason: str) -> list[Operation]:
        return [Shutdown()]

    def progress(self) -> float:
        return 0.0


@pytest.mark.processes
def test_search_program_survives_server_restart(tmp_path: Any) -> None:
    with played(tmp_path) as (live, owner), ThreadPoolExecutor(1) as pool:
        owner.submit(hyperparameters=SPACE, searcher=CUSTOM)
        served = pool.submit(search_program.serve, live.client(), 1, cast("Any", OneTrial))
        until("its trial is there", owner.trials)
        live.kill()
        live.start()
        owner.post("/trials/1/kill")
        served.result(DEADLINE_S)
        assert owner.get(f"{PATH}/events")["over"]


@on_sqlite
@pytest.mark.parametrize(
    ("after", "operations", "status", "problem"),
    [
        (5, [], 409, "after: must be -1"),
        (-1, [create(1), create(1)], 422, "operations[1].trial_id: must be a number that no trial"),
        (-1, [{"kind": "stop", "trial_id": 9}], 422, "must be the number of a trial"),
        (
            -1,
            [create(1), {"kind": "continue", "trial_id": 1, "until": 101}],
            422,
            "operations[1].until: must be at most the trial's length of 100, got 101",
        ),
        (-1, [{"kind": "shutdown"}, create(1)], 422, "operations[0]: must be the last operation"),
        (-1, [{"kind": "dance"}], 422, "dance"),
        (-1, [create(1, source=1)], 422, "operations[0].source: must be the number of a trial"),
    ],
)
def test_invalid_operation_rejects_the_batch(
    search: Server, after: int, operations: list[dict[str, Any]], status: int, problem: str
) -> None:
    response = send(search, after, 6, *operations)
    assert response.status_code == status, response.text
    assert problem in response.text
    assert search.trials() == []
    assert search.get(f"{PATH}/events")["handled"] == -1


@on_sqlite
@pytest.mark.parametrize(("after", "handled"), [(0, 99_999), (0, 4), (-1, 1)])
def test_answer_to_unknown_event_is_rejected(search: Server, after: int, handled: int) -> None:
    """A program that acknowledges a future event would never receive it."""
    if after == 0:
        assert send(search, -1, 0, create(1), create(2)).is_success
    response = send(search, after, handled, create(9))
    assert response.status_code == 422
    newest = 3 if after == 0 else 0  # two trials and their creation events
    text = f"handled: must be an event from 0 to {newest}, the newest one, got {handled}"
    assert text in response.json()["error"]["message"]
    last = search.get(f"{PATH}/events")["events"]
    assert send(search, after, last[-1]["id"] if last else 0, create(9)).is_success


@on_sqlite
def test_search_runs_until_its_program_shuts_down(
    search: Server,
) -> None:
    send(search, -1, 0, create(1))
    search.exit(search.begin(1).run_id, 0)
    search.act("cancel")
    assert search.act("continue")["state"] == "ACTIVE"
    last = search.get(f"{PATH}/events")["events"][-1]["id"]
    assert send(search, 0, last, create(2), {"kind": "shutdown"}).is_success
    search.exit(search.begin(2).run_id, 0)
    assert search.experiment()["state"] == "COMPLETED"


def test_builtin_searcher_rejects_operations(sqlite_server: Server) -> None:
    sqlite_server.submit()
    assert send(sqlite_server, -1, 0, create(5)).status_code == 409


def test_create_operation_with_source_trial(search: Server) -> None:
    assert send(search, -1, 0, create(1), create(2, source=1)).is_success
    rows = search.sql("SELECT id, source_trial_id FROM trials ORDER BY id")
    assert rows == [(1, None), (2, 1)]
    expected = _plain(Create(2, {"lr": 0.1}, 0, source=1))  # the format of a user's searcher class
    assert expected == create(2, trial_seed=0, source=1)
