"""Trials that pause at a rung and are promoted from their checkpoints."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, metrics, on_sqlite, validation
from zerolab.contract.spec import (
    EXIT_INFRASTRUCTURE,
    EXIT_PREEMPTED,
    EXIT_REACHED,
    EXIT_USER_ERROR,
)

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
}
PROMOTING: dict[str, Any] = {
    "name": "async_halving", "metric": "loss", "num_rungs": 3, "divisor": 2, "max_trials": 4,
    "max_concurrent_trials": 1, "max_time": 20, "time_metric": "batches", "stop_once": False,
}  # fmt: skip


@pytest.fixture
def search(server: Server) -> Server:
    server.submit(hyperparameters=SPACE, searcher=PROMOTING, max_restarts=0)
    server.add_agent(slots=2)
    return server


def train_to_rung(server: Server, trial_id: int, loss: float, code: int = EXIT_REACHED) -> None:
    """Train a trial to its next rung and exit."""
    spec = server.begin(trial_id)
    assert spec.fit is not None
    assert spec.fit.max_length is not None
    steps = spec.fit.until or spec.fit.max_length.count
    server.report(spec.run_id, validation(steps, loss), checkpoint(steps, str(trial_id)))
    server.exit(spec.run_id, code if spec.fit.until else 0)


def states(server: Server) -> list[str]:
    return [trial["state"] for trial in server.trials()]


def test_trial_pauses_at_rung_and_resumes(search: Server) -> None:
    spec = search.begin(1)
    assert spec.fit is not None
    assert (spec.fit.until, spec.fit.validate_at) == (5, (5, 10, 20))
    train_to_rung(search, 1, 0.5)
    assert states(search) == ["PAUSED", "QUEUED"]
    assert [item.spec.trial_id for item in search.work()] == [2]
    train_to_rung(search, 2, 0.4)
    again = search.begin(2)
    assert again.fit is not None
    assert again.fit.until == 10
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.steps_completed == 5
    assert search.sql("SELECT waits FROM trials ORDER BY id")[:2] == [(1,), (0,)]


def test_search_end_completes_paused_trials(search: Server) -> None:
    for _ in range(20):
        items = search.work()
        if not items:
            break
        trial_id = items[0].spec.trial_id
        train_to_rung(search, trial_id, 1.0 / trial_id)
    assert search.experiment()["state"] == "COMPLETED"
    assert states(search) == ["COMPLETED"] * 4
    assert max(trial["steps_completed"] for trial in search.trials()) == 20
    for trial in search.trials():
        runs = search.sql(f"SELECT count(*) FROM runs WHERE trial_id = {trial['id']}")[0][0]
        assert runs == {5: 1, 10: 2, 20: 3}[trial["steps_completed"]]


@pytest.mark.needs_extension("checkpoint_removal")
def test_checkpoints_of_paused_trials_are_kept(server: Server) -> None:
    policy = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 0}
    server.submit(hyperparameters=SPACE, searcher=PROMOTING, checkpoint_storage=policy)
    server.add_agent()
    train_to_rung(server, 1, 0.5)  # it waits at its rung and is not the best
    own_checkpoint = checkpoint(5, "1").uuid
    assert server.post("/experiments/1/gc")["checkpoints"] == []
    refused = server.http.delete(f"/api/v1/checkpoints/{own_checkpoint}")
    assert refused.status_code == 409
    assert "trial 1, which is PAUSED, continues from it" in refused.text
    train_to_rung(server, 2, 0.9)
    again = server.begin(1)
    assert again.latest_checkpoint is not None
    assert again.latest_checkpoint.uuid == own_checkpoint
    server.report(again.run_id, validation(10, 0.4), checkpoint(10, "1"))
    rows = server.sql("SELECT trial_id, steps_completed FROM checkpoints WHERE state = 'COMPLETED'")
    assert sorted(rows) == [
        (1, 10),
        (2, 5),
    ]  # checkpoints of passed rungs are removed, those of waiting trials kept


@on_sqlite
def test_missing_metric_at_rung_fails_only_its_trial(search: Server) -> None:
    spec = search.begin(1)
    search.report(spec.run_id, validation(3, 0.5), metrics("validation", 5, accuracy=0.1))
    search.exit(spec.run_id, EXIT_REACHED)
    assert states(search) == ["ERROR", "QUEUED"]
    assert "by a validation at length 5" in search.trial(1)["error"]
    assert search.experiment()["state"] == "ACTIVE"


@on_sqlite
def test_failed_run_at_rung_restarts_when_promoted(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=PROMOTING, max_restarts=1)
    server.add_agent(slots=2)
    spec = server.begin(1)
    server.report(spec.run_id, validation(5, 0.5))
    server.exit(spec.run_id, -9, "killed while it saved")
    assert states(server) == ["PAUSED", "QUEUED"]
    assert server.trial(1)["restarts"] == 1
    train_to_rung(server, 2, 0.6)  # the first of two at the rung is promoted
    server.tick(2)
    again = server.begin(1)
    assert again.latest_checkpoint is None
    assert again.fit is not None
    assert again.fit.until == 10


@on_sqlite
@pytest.mark.parametrize("code", [1, -9, EXIT_USER_ERROR])
@pytest.mark.parametrize("kind", ["promoting", "stopping", "tpe_asha", "pbt"])
def test_run_failing_after_its_validation_fails_its_trial(
    server: Server, kind: str, code: int
) -> None:
    """For each decision after the validation: stop, pause, promote."""
    searcher = {**PROMOTING, "max_trials": 2, "max_concurrent_trials": 2}
    searcher = {**searcher, "stop_once": kind == "stopping"}
    if kind == "tpe_asha":
        keys = {"metric": "loss", "max_length": 8, "max_trials": 2, "max_concurrent_trials": 2}
        searcher = {"name": kind, **keys}
    elif kind == "pbt":
        keys = {"metric": "loss", "population_size": 2, "num_rounds": 1, "length_per_round": 5}
        searcher = {"name": kind, **keys}
    server.submit(hyperparameters=SPACE, searcher=searcher, max_restarts=0)
    server.add_agent(slots=2)
    specs = [server.begin(1), server.begin(2)]
    for spec in specs:
        assert spec.fit is not None
        assert spec.fit.max_length is not None
        length = spec.fit.until or spec.fit.max_length.count
        server.report(spec.run_id, validation(length, 0.5 / spec.trial_id))
        server.exit(spec.run_id, code, "disk full")
    trials = server.trials()
    assert [(row["state"], row["error"]) for row in trials] == [("ERROR", "disk full")] * 2
    experiment = server.experiment()
    assert (experiment["state"], experiment["failed_trials"]) == ("ERROR", 2)
    assert [run["failed"] for run in server.get("/trials/1/runs")["runs"]] == [True]


@on_sqlite
def test_trial_shows_that_its_script_ignores_until(search: Server) -> None:
    reason = "the script trains beyond 5 batches, where the searcher compares its trials: read"
    spec = search.begin(1)
    search.report(spec.run_id, validation(5, 0.5), validation(8, 0.4))
    search.exit(spec.run_id, EXIT_REACHED, reason)
    trial = search.trial(1)
    assert (trial["state"], trial["waiting_reason"], trial["error"]) == ("PAUSED", reason, None)
    train_to_rung(search, 2, 0.6)
    assert search.trial(1)["state"] == "QUEUED"
    spec = search.begin(1)
    search.report(spec.run_id, validation(20, 0.4), checkpoint(20, "1"))
    search.exit(spec.run_id, 0)
    assert (search.trial(1)["state"], search.trial(1)["error"]) == ("COMPLETED", None)


@pytest.mark.needs_extension("search_view")
@on_sqlite
def test_trial_waiting_at_rung_after_failed_run_ends_as_error(server: Server) -> None:
    """A failed run with restarts left; the search ends before the trial is promoted."""
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 2})
    server.add_agent(slots=2)
    spec = server.begin(1)
    server.report(spec.run_id, validation(5, 0.9))
    server.exit(spec.run_id, 1, "disk full")
    assert server.trial(1)["state"] == "PAUSED"
    for _ in range(3):
        server.tick(60)
        train_to_rung(server, 2, 0.1)
    experiment = server.experiment()
    assert (experiment["state"], experiment["failed_trials"]) == ("COMPLETED", 1)
    assert experiment["canceled_trials"] == 0
    (failed,) = [row for row in server.trials() if row["state"] == "ERROR"]
    assert (failed["id"], failed["error"]) == (1, "disk full")
    listed = server.get("/experiments")["experiments"][0]
    assert (listed["num_trials"], listed["failed_trials"]) == (2, 1)
    assert "FAILED" in str(server.get("/experiments/1/searcher")).upper()


@on_sqlite
def test_run_stopped_by_searcher_is_not_failed(server: Server) -> None:
    """A run killed while stopping, or with failed storage, after its last validation."""
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 2, "stop_once": True})
    server.add_agent(slots=2)
    first = server.begin(1)
    server.report(first.run_id, validation(20, 0.1))
    server.execute("UPDATE runs SET killed = 1 WHERE id = :id", id=first.run_id)
    server.exit(first.run_id, -9)
    second = server.begin(2)
    server.report(second.run_id, validation(20, 0.1))
    server.exit(second.run_id, EXIT_INFRASTRUCTURE, "storage away")
    assert states(server) == ["COMPLETED", "COMPLETED"]


@on_sqlite
def test_promotion_while_run_stops_requeues_trial(server: Server) -> None:
    searcher = {**PROMOTING, "max_trials": 1}
    server.submit(hyperparameters=SPACE, searcher=searcher)
    server.add_agent()
    train_to_rung(server, 1, 0.5, EXIT_PREEMPTED)
    assert states(server) == ["QUEUED"]
    train_to_rung(server, 1, 0.4)
    spec = server.begin(1)
    assert spec.fit is not None
    assert spec.fit.until is None
    train_to_rung(server, 1, 0.3)
    assert server.experiment()["state"] == "COMPLETED"


@on_sqlite
def test_pause_keeps_trials_waiting_at_rung(search: Server) -> None:
    train_to_rung(search, 1, 0.5)
    search.act("pause")
    run = search.work()[0].run_id
    search.post(f"/runs/{run}/started", {})
    search.exit(run, EXIT_PREEMPTED)
    assert states(search) == ["PAUSED", "PAUSED"]
    search.act("activate")
    assert states(search) == ["PAUSED", "QUEUED"]
    search.post("/trials/1/pause")
    search.post("/trials/1/activate")  # not sent to the searcher
    assert states(search) == ["PAUSED", "QUEUED"]
    search.act("cancel")
    assert search.experiment()["state"] in {"CANCELED", "STOPPING_CANCELED"}


@on_sqlite
def test_epoch_unit_requires_records_per_epoch(server: Server) -> None:
    searcher = {**PROMOTING, "time_metric": "epochs", "num_rungs": 2, "divisor": 4}
    server.submit(hyperparameters=SPACE, searcher=searcher)
    server.add_agent()
    spec = server.begin(1)
    server.report(spec.run_id, validation(100, 0.5))
    server.exit(spec.run_id, -9)
    assert states(server)[0] == "ERROR"
    assert server.trial(1)["error"].startswith("epochs: must be among the validation metrics")
    spec = server.begin(2)
    server.report(spec.run_id, validation(100, 0.5, epochs=4.0))
    assert server.directive(spec.run_id) == "train"
    server.report(spec.run_id, validation(125, 0.5, epochs=5.0))
    assert server.directive(spec.run_id) == "preempt"


@on_sqlite
def test_max_concurrent_trials_is_respected(search: Server) -> None:
    spec = search.begin(1)  # there are two slots, but one trial at a time
    search.report(spec.run_id, validation(5, 0.5))
    assert states(search) == ["RUNNING", "QUEUED"]
    assert [item.spec.trial_id for item in search.work()] == [1]
    _, second = search.get("/experiments/1/trials")["trials"]
    assert "searcher.max_concurrent_trials" in second["waiting_reason"]
    search.report(spec.run_id, checkpoint(5, "1"))
    search.exit(spec.run_id, EXIT_REACHED)
    assert [item.spec.trial_id for item in search.work()] == [2]


def extend(server: Server, run_id: int, until: int) -> dict[str, Any]:
    response: dict[str, Any] = server.post(f"/runs/{run_id}/extend", {"until": until})
    return response


def test_report_starts_next_trial_immediately(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_concurrent_trials": 2})
    server.add_agent(slots=3)
    assert [item.spec.trial_id for item in server.work()] == [1, 2]
    server.execute("UPDATE experiments SET concurrent_trials = 0")
    server.services.orchestrator.queue.jobs.clear()
    spec = server.begin(1)
    server.report(spec.run_id, validation(5, 0.5))  # nothing else happens: no tick, no exit
    assert [item.spec.trial_id for item in server.work()] == [1, 2, 3]


def test_promotion_continues_in_same_run(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 1})
    server.add_agent()
    spec = server.begin(1)
    assert extend(server, spec.run_id, 5) == {"goes_on": False, "until": None}  # nothing reported
    server.report(spec.run_id, validation(5, 0.5), checkpoint(5, "1"))
    assert server.directive(spec.run_id) == "train"
    for _ in range(2):  # a response may be lost
        response = extend(server, spec.run_id, 5)
        assert response["goes_on"]
    if response["until"] is not None:
        assert response["until"] > 5
    server.report(spec.run_id, validation(10, 0.4), validation(20, 0.3))
    server.exit(spec.run_id, 0)
    assert server.experiment()["state"] == "COMPLETED"
    assert server.sql("SELECT count(*) FROM runs") == [(1,)]


@pytest.mark.needs_extension("queue")
@on_sqlite
@pytest.mark.parametrize("first", [True, False])
def test_promoted_trial_yields_to_higher_priority(server: Server, first: bool) -> None:
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 1})
    server.add_agent()
    spec = server.begin(1)
    server.submit(hyperparameters={"deepspeed_config": "ds_config.json"})
    server.post("/jobs/2/move", {"ahead_of" if first else "behind": 1})
    server.report(spec.run_id, validation(5, 0.5), checkpoint(5, "1"))
    assert server.directive(spec.run_id) == "train"
    assert extend(server, spec.run_id, 5)["goes_on"] != first


@on_sqlite
@pytest.mark.parametrize("ended", [True, False])
def test_promotion_ignores_unrelated_lost_node(server: Server, ended: bool) -> None:
    server.submit(hyperparameters={"deepspeed_config": "ds_config.json"})
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 1})
    server.add_agent(slots=2)
    first, spec = server.begin(1), server.begin(2)
    if ended:
        server.exit(first.run_id, 0)
    server.add_agent(slots=2, up=1)
    server.report(spec.run_id, validation(5, 0.5), checkpoint(5, "1"))
    assert extend(server, spec.run_id, 5)["goes_on"]


@on_sqlite
def test_preempted_run_is_not_promoted_in_place(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "max_trials": 1})
    server.add_agent()
    spec = server.begin(1)
    server.report(spec.run_id, validation(5, 0.5), checkpoint(5, "1"))
    server.act("pause")
    assert not extend(server, spec.run_id, 5)["goes_on"]


@on_sqlite
@pytest.mark.parametrize(
    ("closed", "body"),
    [(None, {}), (1, {"drain": True}), (2, {"drain": True}), (2, {"drain": True, "slots": [0]})],
)
def test_promotion_in_place_requires_both_agents(
    server: Server, closed: int | None, body: dict[str, Any]
) -> None:
    server.submit(
        hyperparameters=SPACE,
        searcher={**PROMOTING, "max_trials": 1},
        resources={"slots_per_trial": 2, "max_nodes": 2},
    )
    for name in ("a", "b"):
        server.add_agent(name=name)
    spec = server.begin(1)
    assert server.sql("SELECT agent_id FROM run_nodes ORDER BY node_rank") == [(1,), (2,)]
    server.add_agent(slots=2, name="c")  # its slots are free
    server.report(spec.run_id, validation(5, 0.5), checkpoint(5, "1"))
    if closed is not None:
        server.post(f"/agents/{closed}/disable", body)
    assert extend(server, spec.run_id, 5)["goes_on"] == (closed is None)


@on_sqlite
def test_continued_run_without_metric_fails(
    server: Server,
) -> None:
    server.submit(hyperparameters=SPACE, searcher={**PROMOTING, "stop_once": True})
    server.add_agent()
    spec = server.begin(1)
    server.report(spec.run_id, validation(3, 0.5), metrics("validation", 4, accuracy=0.1))
    assert server.directive(spec.run_id) == "train"  # 4 is no rung
    server.report(spec.run_id, metrics("validation", 5, accuracy=0.1))
    server.exit(spec.run_id, 0)
    assert states(server) == ["ERROR", "QUEUED"]
    error = server.trial(1)["error"]
    assert "by a validation at length 5" in error
    assert error.endswith("there are: accuracy")


def train_all(server: Server, experiment_id: int = 1) -> None:
    """Train all trials; older trials have better metrics."""
    while server.experiment(experiment_id)["state"] == "ACTIVE":
        trial_id = server.work()[0].spec.trial_id
        train_to_rung(server, trial_id, float(trial_id))


def grow(server: Server, **fields: Any) -> Any:
    body = {"config": {"searcher": fields}}
    return server.http.post("/api/v1/experiments/1/continue", json=body)


def lengths(server: Server) -> list[int]:
    return [trial["steps_completed"] for trial in server.trials()]


def rungs(server: Server) -> list[tuple[int, list[int]]]:
    view = server.get("/experiments/1/searcher")
    return [
        (rung["length"], [entry["trial_id"] for entry in rung["entries"]])
        for rung in view["searcher"]["brackets"][0]["rungs"]
    ]


@pytest.mark.needs_extension("continued_experiments", "search_view")
def test_continue_ended_search_with_trials_and_length(
    search: Server,
) -> None:
    train_all(search)
    assert lengths(search) == [20, 10, 5, 5]
    answer = grow(search, max_trials=8)
    assert answer.is_success, answer.text
    assert states(search) == ["COMPLETED", "PAUSED", "PAUSED", "PAUSED", "QUEUED"]
    search.services.orchestrator.searches.searchers.clear()  # force a replay of the events
    train_all(search)
    # Of eight at the lowest rung four are promoted, two of these to the top. Trials that paused
    # when there were four resume from their checkpoints.
    assert lengths(search) == [20, 20, 10, 10, 5, 5, 5, 5]
    assert search.experiment()["num_trials"] == 8
    assert search.sql("SELECT count(*) FROM runs WHERE trial_id = 2")[0][0] == 3

    assert grow(search, max_time=40).is_success
    config = search.experiment()["config"]["searcher"]
    assert (config["max_time"], config["num_rungs"]) == (40, 4)
    spec = search.begin(1)
    assert spec.fit is not None
    assert (spec.fit.until, spec.fit.validate_at) == (None, (5, 10, 20, 40))  # to its length
    assert spec.latest_checkpoint is not None
    assert spec.latest_checkpoint.steps_completed == 20
    train_all(search)
    assert lengths(search) == [40, 20, 10, 10, 5, 5, 5, 5]
    top = [(20, [1, 2]), (40, [1])]
    assert rungs(search)[2:] == top
    assert grow(search, max_time=80).is_success  # and once more
    train_all(search)
    assert lengths(search)[0] == 80
    assert rungs(search)[2:] == [*top, (80, [1])]
    response = grow(search, max_time=80)
    assert response.status_code == 409
    assert "no trial can be continued" in response.json()["error"]["message"]


@pytest.mark.needs_extension("continued_experiments")
@on_sqlite
def test_continue_canceled_search_with_growth(search: Server) -> None:
    train_to_rung(search, 1, 1.0)
    search.act("cancel")
    search.exit(search.begin(2).run_id, EXIT_PREEMPTED)
    assert states(search) == ["CANCELED", "CANCELED"]
    assert grow(search, max_trials=6, max_time=40).is_success
    assert states(search) == ["PAUSED", "QUEUED"]
    train_all(search)
    assert states(search) == ["COMPLETED"] * 6
    assert max(lengths(search)) == 40


@pytest.mark.needs_extension("checkpoint_removal", "continued_experiments")
@on_sqlite
def test_trial_without_checkpoint_stays_ended(search: Server) -> None:
    train_all(search)
    for saved in search.get("/trials/2/checkpoints")["checkpoints"]:
        assert search.http.delete(f"/api/v1/checkpoints/{saved['uuid']}").is_success
    assert grow(search, max_trials=8).is_success
    assert states(search) == ["COMPLETED", "COMPLETED", "PAUSED", "PAUSED", "QUEUED"]
    train_all(search)
    assert lengths(search) == [20, 10, 10, 10, 5, 5, 5, 5]


@pytest.mark.needs_extension("continued_experiments")
@on_sqlite
def test_invalid_rung_lengths_list_valid_ones(search: Server) -> None:
    train_all(search)
    response = grow(search, max_time=50, max_trials=3, divisor=4)
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert [line.partition(": ")[0] for line in problems] == [
        "searcher.divisor",
        "searcher.max_trials",
    ]
    (problems,) = grow(search, max_time=50).json()["error"]["problems"]
    assert problems == (
        "searcher.max_time: must be 20 times a power of the divisor (40, 80, ...), so that the "
        "rungs of earlier comparisons stay (5, 10, 20), got 50"
    )
    for fields, number, length in (
        ({"num_rungs": 4}, 3, 20),
        ({"num_rungs": 2, "max_trials": 8}, 3, 20),
        ({"num_rungs": 5, "max_time": 40}, 4, 40),
    ):
        (problems,) = grow(search, **fields).json()["error"]["problems"]
        assert problems == (
            f"searcher.num_rungs: must be {number}, which follows from max_time = {length}, so "
            "that the rungs of earlier comparisons stay; leave it unchanged, got "
            f"{fields['num_rungs']}"
        )
    assert states(search) == ["COMPLETED"] * 4
