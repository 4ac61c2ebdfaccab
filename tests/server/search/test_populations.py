"""``tpe_asha`` and ``pbt`` in the server: their operations reach the runs."""

import math
from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, on_sqlite, validation
from zerolab.contract.spec import EXIT_REACHED, RunSpec

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "kind": {"type": "categorical", "vals": ["sgd", "adam"]},
    "momentum": {"type": "double", "minval": 0, "maxval": 0.99, "when": {"kind": "sgd"}},
}
TPE: dict[str, Any] = {
    "name": "tpe_asha", "metric": "loss", "max_trials": 12, "max_length": 27,
    "max_concurrent_trials": 2,
}  # fmt: skip
PROMOTING: dict[str, Any] = {
    "name": "async_halving", "metric": "loss", "num_rungs": 2, "divisor": 2, "max_trials": 6,
    "max_concurrent_trials": 2, "max_time": 8, "time_metric": "batches", "stop_once": False,
}  # fmt: skip
PBT: dict[str, Any] = {
    "name": "pbt", "metric": "loss", "population_size": 3, "num_rounds": 2, "length_per_round": 5,
    "replace_function": {"truncate_fraction": 0.4}, "max_concurrent_trials": 3,
}  # fmt: skip


def train_to_rung(server: Server, spec: RunSpec, loss: float) -> int:
    """Train a trial to its next rung and exit; return the length."""
    assert spec.fit is not None
    assert spec.fit.max_length is not None
    steps = spec.fit.until or spec.fit.max_length.count
    server.report(spec.run_id, validation(steps, loss), checkpoint(steps, str(spec.trial_id)))
    server.exit(spec.run_id, EXIT_REACHED if spec.fit.until else 0)
    return steps


def finish(server: Server, most: int = 200) -> list[tuple[int, int]]:
    """Train all assigned runs; return (trial, length) in order."""
    lengths = []
    for _ in range(most):
        items = server.work()
        if not items:
            break
        spec = server.begin(items[0].spec.trial_id)
        loss = abs(math.log10(spec.hparams["lr"]) + 2)
        lengths.append((spec.trial_id, train_to_rung(server, spec, loss)))
    return lengths


def log_of(server: Server) -> list[tuple[Any, ...]]:
    return server.sql(
        "SELECT request_id, hparams, seed, state, steps_completed FROM trials ORDER BY id"
    )


@pytest.mark.needs_extension("search_view")
def test_tpe_asha_search_finishes(server: Server) -> None:
    server.submit(hyperparameters=SPACE, searcher=TPE)
    server.add_agent(slots=2)
    lengths = finish(server)
    assert server.experiment()["state"] == "COMPLETED"
    assert {length for _, length in lengths} == {1, 3, 9, 27}
    assert {trial["state"] for trial in server.trials()} == {"COMPLETED"}
    assert [trial["id"] for trial in server.trials()] == list(range(1, 13))
    rungs = server.get("/experiments/1/searcher")["searcher"]["brackets"][0]["rungs"]
    assert [rung["length"] for rung in rungs] == [1, 3, 9, 27]
    assert len(rungs[3]["entries"]) == sum(length == 27 for _, length in lengths)


@on_sqlite
@pytest.mark.parametrize("searcher", [TPE, PBT], ids=["tpe_asha", "pbt"])
def test_replayed_searcher_creates_same_trials(server: Server, searcher: dict[str, Any]) -> None:
    server.add_agent(slots=3)
    server.submit(hyperparameters=SPACE, searcher=searcher, reproducibility={"experiment_seed": 5})
    finish(server)
    first = log_of(server)
    count = len(first)
    server.submit(hyperparameters=SPACE, searcher=searcher, reproducibility={"experiment_seed": 5})
    for _ in range(200):
        server.services.orchestrator.searches.searchers.clear()
        if not finish(server, most=1):
            break
    assert log_of(server)[count:] == first


@pytest.mark.needs_extension("continued_experiments", "search_view")
@on_sqlite
@pytest.mark.parametrize("searcher", [TPE, PROMOTING, PBT], ids=["tpe_asha", "asha", "pbt"])
def test_continued_search_without_deleted_trials_ends(
    server: Server, searcher: dict[str, Any]
) -> None:
    server.add_agent(slots=3)
    server.submit(hyperparameters=SPACE, searcher=searcher)
    lengths = [trial_id for trial_id, _ in finish(server, most=2)]
    server.act("kill")
    for item in server.work():
        server.exit(item.run_id, -9)
    for trial_id in lengths:  # they wait at a rung and count for the searcher
        server.request("DELETE", f"/trials/{trial_id}")
    remaining = {trial["id"] for trial in server.trials()}
    assert not remaining & set(lengths)
    server.post("/experiments/1/continue")
    server.services.orchestrator.searches.searchers.clear()
    finish(server)
    assert server.experiment()["state"] == "COMPLETED"
    created = server.sql("SELECT request_id FROM searcher_events WHERE kind = 'created'")
    assert len(created) == len(set(created)) > len(lengths)
    assert {trial["state"] for trial in server.trials()} == {"COMPLETED"}
    sources = {trial["source_trial_id"] for trial in server.trials()} - {None}
    assert sources == (remaining if searcher is PBT else set())  # the best remaining trial
    brackets = server.get("/experiments/1/searcher")["searcher"]["brackets"]
    rungs = [rung for bracket in brackets for rung in bracket["rungs"]]
    assert not {entry["trial_id"] for rung in rungs for entry in rung["entries"]} & set(lengths)


@pytest.mark.needs_extension("pbt")
@on_sqlite
def test_pbt_copy_starts_from_best_weights(
    server: Server,
) -> None:
    server.submit(hyperparameters=SPACE, searcher=PBT)
    server.add_agent(slots=3)
    for trial_id, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
        assert train_to_rung(server, server.begin(trial_id), loss) == 5
    assert server.trial(1)["state"] == "COMPLETED"
    spec = server.begin(4)
    assert spec.latest_checkpoint is not None
    assert spec.latest_checkpoint.uuid == checkpoint(5, "2").uuid
    assert spec.latest_checkpoint.warm_start
    assert spec.fit is not None
    assert spec.fit.until == 5
    assert server.begin(2).fit.until in {None, 10}  # type: ignore[union-attr]
    train_to_rung(server, spec, 0.2)
    finish(server)
    assert server.experiment()["state"] == "COMPLETED"
    assert [trial["steps_completed"] for trial in server.trials()] == [5, 10, 10, 5]


@pytest.mark.needs_extension("continued_experiments")
def test_pbt_growth_over_max_rounds_is_rejected(sqlite_server: Server) -> None:
    population = {key: value for key, value in PBT.items() if key != "length_per_round"}
    population_config = population | {"max_length": 10}
    sqlite_server.submit(activate=False, hyperparameters=SPACE, searcher=population_config)
    sqlite_server.act("kill")
    body = {"config": {"searcher": {"max_length": 50_010}}}
    response = sqlite_server.http.post("/api/v1/experiments/1/continue", json=body)
    assert response.status_code == 422
    (problem,) = response.json()["error"]["problems"]
    assert problem == "searcher.num_rounds: must be at most 10000, got 10002"
