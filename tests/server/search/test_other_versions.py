"""Searches that were started by another version of a searcher."""

from typing import Any

import pytest

from tests.server.helpers import Clock, Server, checkpoint, serve, validation
from zerolab.contract.spec import EXIT_REACHED
from zerolab.extensions.searcher_tpe import ladder
from zerolab.schema.space import Space
from zeroserver.orchestrator.search import search_service

SPACE = {"deepspeed_config": "ds_config.json", "lr": {"type": "double", "minval": 0, "maxval": 1}}
SEARCH: dict[str, Any] = {
    "name": "tpe_asha", "metric": "loss", "max_length": 27, "max_trials": 20,
    "max_concurrent_trials": 2,
}  # fmt: skip
WORDS = "another version of Zerolab started this search"


def train_next(server: Server) -> None:
    spec = server.work()[0].spec
    server.post(f"/runs/{spec.run_id}/started", {})
    assert spec.fit is not None
    steps = spec.fit.until or 27
    loss = (spec.trial_id * 7 % 5 + 1) / steps
    server.report(spec.run_id, validation(steps, loss), checkpoint(steps, str(spec.run_id)))
    server.exit(spec.run_id, EXIT_REACHED if spec.fit.until else 0)


def begin(server: Server, runs: int) -> None:
    server.submit(hyperparameters=SPACE, searcher=SEARCH)
    server.add_agent(slots=2)
    for _ in range(runs):
        train_next(server)


def other_entries(patch: pytest.MonkeyPatch) -> None:
    """Change the first rung of trials, so that the replay promotes other trials."""
    patch.setattr(ladder, "_ENTRIES", (0.0, 0.0, 1.0))


def other_draws(patch: pytest.MonkeyPatch) -> None:
    hparams = Space.hparams
    patch.setattr(Space, "hparams", lambda self, at: hparams(self, tuple(1 - x for x in at)))


OTHER = pytest.mark.parametrize("change", [other_entries, other_draws])


@OTHER
def test_incompatible_running_search_fails_with_reason(
    change: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    with serve(tmp_path, clock=clock) as server:
        begin(server, 9)
        trials = server.trials()
    with serve(tmp_path, clock=clock) as server, monkeypatch.context() as patch:
        change(patch)
        train_next(server)  # its reports are stored
        server.tick()
        experiment = server.experiment()
        assert experiment["state"] in {"STOPPING_ERROR", "ERROR"}
        for item in server.work():
            server.exit(item.run_id, 1)
        server.tick(1)
        experiment = server.experiment()
        assert experiment["state"] == "ERROR"
        assert experiment["error"].startswith(WORDS)
        assert "`zerolab experiment fork 1`" in experiment["error"]
        after = server.trials()
        assert [trial["hparams"] for trial in after] == [trial["hparams"] for trial in trials]
        best = [trial["best_validation"] for trial in trials]
        assert sum(a["best_validation"] != b for a, b in zip(after, best, strict=True)) == 1
        state = server.get("/experiments/1/searcher")["searcher"]
        assert state["problem"].startswith(WORDS)
        assert state["brackets"] == []
        refused = server.http.post("/api/v1/experiments/1/continue", json={})
        assert refused.status_code == 409
        assert f"experiment 1: cannot be continued: {WORDS}" in refused.text
        assert server.experiment() == experiment
    with serve(tmp_path, clock=clock) as server:  # of the version that began it
        assert server.get("/experiments/1/searcher")["searcher"]["problem"] is None
        assert server.act("continue")["state"] == "ACTIVE"
        for _ in range(6):
            train_next(server)
        assert server.experiment()["num_trials"] > len(trials)


def test_independent_samples_continue_across_versions(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    random = {"name": "random", "metric": "loss", "max_length": 27, "max_trials": 6}
    with serve(tmp_path, clock=clock) as server:
        server.submit(hyperparameters=SPACE, searcher=random | {"max_concurrent_trials": 2})
        server.add_agent(slots=2)
        train_next(server)
        hparams = [trial["hparams"] for trial in server.trials()]
    other_draws(monkeypatch)
    with serve(tmp_path, clock=clock) as server:
        for _ in range(5):
            train_next(server)
        server.tick()
        assert server.experiment()["state"] == "COMPLETED"
        trials = server.trials()
        assert len(trials) == 6
        assert [trial["hparams"] for trial in trials][: len(hparams)] == hparams


def test_fingerprint_covers_all_hparam_types(tmp_path: Any) -> None:
    odd = [1e300, -0.0, 2**53, True, None, [1, [2.5, "x"]], {"a": {"b": 1e-320}}, "é\n", 1]
    space = SPACE | {"odd": {"type": "categorical", "vals": odd}, "fixed": [0.1, {"deep": [7]}]}
    clock = Clock()
    with serve(tmp_path, clock=clock) as server:
        server.submit(hyperparameters=space, searcher=SEARCH)
        server.add_agent(slots=2)
    for _ in range(12):
        with serve(tmp_path, clock=clock) as server:
            train_next(server)
            server.tick()
            assert server.experiment()["state"] == "ACTIVE"


@OTHER
def test_ended_incompatible_search_shows_no_rungs(
    change: Any, sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(sqlite_server, 9)
    sqlite_server.act("kill")
    for item in sqlite_server.work():
        sqlite_server.exit(item.run_id, 1)
    assert sqlite_server.experiment()["state"] == "CANCELED"
    seen = sqlite_server.get("/experiments/1/searcher")["searcher"]
    assert seen["problem"] is None
    assert seen["brackets"] != []
    sqlite_server.services.orchestrator.searches.ended_views.clear()
    with monkeypatch.context() as patch:
        change(patch)
        state = sqlite_server.get("/experiments/1/searcher")["searcher"]
        assert state["problem"].startswith(WORDS)
        assert state["brackets"] == []
        assert sqlite_server.experiment()["state"] == "CANCELED"


def test_ended_search_is_replayed_once(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = []
    begin(sqlite_server, 3)
    sqlite_server.act("kill")
    for item in sqlite_server.work():
        sqlite_server.exit(item.run_id, 1)
    fold = search_service._fold
    monkeypatch.setattr(search_service, "_fold", lambda *inputs: folds.append(1) or fold(*inputs))
    first = sqlite_server.get("/experiments/1/searcher")
    assert sqlite_server.get("/experiments/1/searcher") == first
    assert folds == [1]
