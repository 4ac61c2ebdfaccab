"""Rungs of a search and the preview of its cost, over REST."""

from typing import Any

import pytest

from tests.server.helpers import Server, checkpoint, experiment_config, validation
from zerolab.contract.spec import EXIT_REACHED

SPACE = {
    "deepspeed_config": "ds_config.json",
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
}
PROMOTING: dict[str, Any] = {
    "name": "async_halving", "metric": "loss", "num_rungs": 2, "divisor": 2, "max_trials": 3,
    "max_concurrent_trials": 1, "max_length": 10, "stop_once": False,
}  # fmt: skip


def run_next(server: Server, loss: float | str) -> None:
    spec = server.work()[0].spec
    server.post(f"/runs/{spec.run_id}/started", {})
    assert spec.fit is not None
    steps = spec.fit.until or 10
    server.report(spec.run_id, validation(steps, loss), checkpoint(steps, str(spec.trial_id)))
    server.exit(spec.run_id, EXIT_REACHED if spec.fit.until else 0)


@pytest.mark.needs_extension("search_view")
def test_rungs_list_trials_during_and_after_search(
    server: Server,
) -> None:
    server.submit()  # so that trial ids and the searcher's numbers differ
    server.submit(hyperparameters=SPACE, searcher=PROMOTING)
    server.act("kill", 1)
    server.add_agent()
    run_next(server, 0.5)
    run_next(server, 0.4)
    state = server.get("/experiments/2/searcher")["searcher"]
    assert (state["name"], state["unit"], state["metric"]) == ("async_halving", "batches", "loss")
    assert (state["done"], state["smaller_is_better"]) == (False, True)
    (bracket,) = state["brackets"]
    assert bracket["trials"] == 3
    low, high = bracket["rungs"]
    assert low == {
        "length": 5,
        "training": [],
        "entries": [
            {"trial_id": 3, "metric": 0.4, "state": "promoted"},
            {"trial_id": 2, "metric": 0.5, "state": "paused"},
        ],
    }
    assert high == {"length": 10, "training": [3], "entries": []}
    run_next(server, 0.3)
    run_next(server, "NaN")
    assert server.experiment(2)["state"] == "COMPLETED"
    assert 2 not in server.services.orchestrator.searches.searchers
    state = server.get("/experiments/2/searcher")["searcher"]
    assert state["done"]
    low, high = state["brackets"][0]["rungs"]
    assert low["entries"][-1] == {"trial_id": 4, "metric": None, "state": "stopped"}
    assert high["entries"] == [{"trial_id": 3, "metric": 0.3, "state": "completed"}]
    assert 2 not in server.services.orchestrator.searches.searchers


@pytest.mark.needs_extension("search_view")
def test_random_search_has_no_brackets(sqlite_server: Server) -> None:
    sqlite_server.submit()
    assert sqlite_server.get("/experiments/1/searcher")["searcher"]["brackets"] == []
    assert sqlite_server.http.get("/api/v1/experiments/9/searcher").status_code == 404


def preview(server: Server, searcher: dict[str, Any], **more: Any) -> Any:
    config = experiment_config(hyperparameters=SPACE, searcher=searcher)
    config["resources"] = {"slots_per_trial": 2}
    body = {"config": config, **more}
    return server.http.post("/api/v1/experiments/preview", json=body)


ADAPTIVE = {
    "name": "adaptive_asha", "metric": "loss", "divisor": 3, "max_rungs": 10, "max_trials": 10,
    "max_concurrent_trials": 5, "max_time": 900, "time_metric": "batches",
}  # fmt: skip


@pytest.mark.needs_extension("search_preview")
def test_preview_counts_trials_and_cost(sqlite_server: Server) -> None:
    response = preview(sqlite_server, ADAPTIVE, seconds_per_batch=2)
    assert response.status_code == 200, response.text
    estimate = response.json()["preview"]
    assert estimate["lengths"] == [
        {"length": 100, "trials": 5}, {"length": 300, "trials": 3}, {"length": 900, "trials": 2},
    ]  # fmt: skip
    assert (estimate["trials"], estimate["unit"], estimate["total_length"]) == (10, "batches", 3200)
    assert estimate["slot_hours"] == pytest.approx(3200 * 2 * 2 / 3600)
    assert estimate["most_length"] == 10 * 900
    assert estimate["most_slot_hours"] == pytest.approx(9000 * 2 * 2 / 3600)
    assert preview(sqlite_server, ADAPTIVE).json()["preview"]["slot_hours"] is None
    assert sqlite_server.get("/experiments")["experiments"] == []


@pytest.mark.needs_extension("search_preview")
def test_preview_estimates_time_from_similar_experiment(server: Server) -> None:
    server.submit(resources={"slots_per_trial": 2})
    server.add_agent(slots=2)
    spec = server.begin()
    server.report(spec.run_id, validation(50, 0.5, epochs=5.0))
    server.clock.now += 100
    server.exit(spec.run_id, 0)
    estimate = preview(server, ADAPTIVE).json()["preview"]
    assert (estimate["like"], estimate["seconds_per_unit"]) == (1, 2.0)
    in_epochs = {**ADAPTIVE, "time_metric": "epochs"}
    assert preview(server, in_epochs, like=1).json()["preview"]["seconds_per_unit"] == 20.0


@pytest.mark.needs_extension("search_preview")
@pytest.mark.parametrize(
    ("searcher", "more", "problem"),
    [
        ({"name": "adaptive_asha", "metric": "m"}, {}, "searcher.max_trials: is required"),
        (ADAPTIVE, {"seconds_per_epoch": 1}, "seconds_per_epoch: must be in the unit of the"),
        (ADAPTIVE, {"seconds_per_batch": 0}, "seconds_per_batch"),
        (ADAPTIVE, {"like": 1}, "like: must have trained before, got experiment 1"),
    ],
)
def test_invalid_preview_is_rejected(
    sqlite_server: Server, searcher: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    sqlite_server.submit()
    response = preview(sqlite_server, searcher, **more)
    assert response.status_code == 422
    assert problem in response.text
    assert preview(sqlite_server, ADAPTIVE, like=7).status_code == 404
