"""Analysis of an experiment's trials: order, filters, cost, importance."""

import asyncio
import json
import math
import random
import threading
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

from tests.server.helpers import (
    PREFIX,
    Server,
    experiment_config,
    metrics,
    training,
    validation,
)
from tests.waiting import DEADLINE_S
from zerolab.contract.flatten import flatten_hparams
from zeroserver.analysis.columns import Row, read_rows
from zeroserver.extensions.analysis.importance import (
    MIN_TRIALS,
    ImportanceCache,
    ImportanceResult,
    importance,
)

RATES = [0.5, 0.001, 0.1, 0.02, 0.3]
GRID = {
    "deepspeed_config": "ds_config.json",
    "optimizer": {"lr": {"type": "categorical", "vals": RATES}},
    "word": {"type": "categorical", "vals": ["b", "a"]},
}
SEARCHER = {
    "name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": 10,
}  # fmt: skip


def completed_search(server: Server, slots_per_trial: int = 1) -> list[dict[str, Any]]:
    """Run ten trials whose loss is their learning rate; later trials cost more."""
    server.submit(
        searcher=SEARCHER, hyperparameters=GRID, resources={"slots_per_trial": slots_per_trial}
    )
    server.add_agent(slots=10 * slots_per_trial)
    for item in server.work():
        server.clock.now += 10
        server.post(f"/runs/{item.run_id}/started", {})
        loss = item.spec.hparams["optimizer"]["lr"]
        server.report(item.run_id, validation(20, loss))
        server.exit(item.run_id, 0)
    return server.trials()


def pages(server: Server, **params: Any) -> list[dict[str, Any]]:
    """Return all trials, read in pages of three."""
    rows: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        cursor = {} if after is None else {"after": after}
        page = server.get("/experiments/1/trials", limit=3, **params, **cursor)
        rows += page["trials"]
        after = page["next_after"]
        if after is None:
            assert page["total"] == len(rows)
            return rows


def where_json(*conditions: Any) -> str:
    return json.dumps(conditions)


def test_trials_are_paged_by_hparam(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    completed_search(server)
    full_reads: list[Any] = []  # reads of all rows

    def counted(*arguments: Any) -> Any:
        full_reads.append(arguments)
        return read_rows(*arguments)

    monkeypatch.setattr("zeroserver.api.trials.read_rows", counted)
    rising = pages(server, sort="hparams.optimizer.lr")
    rates = [trial["hparams"]["optimizer"]["lr"] for trial in rising]
    assert rates == sorted(RATES * 2)
    falling = pages(server, sort="-hparams.optimizer.lr")
    assert [trial["id"] for trial in falling] == [trial["id"] for trial in rising][::-1]
    values = [trial["hparams"]["word"] for trial in pages(server, sort="-hparams.word")]
    assert values == ["b"] * 5 + ["a"] * 5
    server.post(f"/trials/{rising[4]['id']}/archive", {})
    server.execute(f"UPDATE trials SET state = 'ERROR' WHERE id = {rising[7]['id']}")
    ids = [trial["id"] for trial in rising]
    visible = [*ids[:4], *ids[5:7], *ids[8:]]  # the default filter of the web page and the CLI
    shown = {"sort": "hparams.optimizer.lr", "archived": False, "state": "COMPLETED"}
    assert [trial["id"] for trial in pages(server, **shown)] == visible
    of_word = where_json(["hparams.word", "=", "a"])
    quick = pages(server, **shown, where=of_word)
    assert not full_reads
    slow = pages(server, **shown, where=where_json(["hparams.word", "=", "a"], ["id", ">", 0]))
    assert full_reads
    assert quick == slow
    archived = pages(server, sort="hparams.word", archived=True)
    assert [trial["id"] for trial in archived] == [ids[4]]


def test_hparam_order_includes_new_trials(server: Server) -> None:
    completed_search(server)
    before = pages(server, sort="-hparams.optimizer.lr")
    columns = "experiment_id, request_id, state, seed, created_at"
    server.execute(
        f"INSERT INTO trials ({columns}, hparams, restarts, waits, steps_completed, progress, "
        "searcher_steps, excluded, labels) VALUES (1, 99, 'CANCELED', 1, 1.0, "
        """'{"optimizer": {"lr": 7.5}}', 0, 0, 0, 0, -1, '[]', '[]')"""
    )
    after = pages(server, sort="-hparams.optimizer.lr")
    assert after[0]["hparams"] == {"optimizer": {"lr": 7.5}}
    assert [trial["id"] for trial in after[1:]] == [trial["id"] for trial in before]
    assert after[0]["id"] == pages(server, sort="hparams.word")[-1]["id"]  # it has none


def test_best_trials_first_for_min_and_max(server: Server) -> None:
    completed_search(server)
    assert [trial["best_validation"] for trial in pages(server, sort="metric")] == sorted(RATES * 2)
    server.execute("UPDATE experiments SET smaller_is_better = 0")
    values = [trial["best_validation"] for trial in pages(server, sort="metric")]
    assert values == sorted(RATES * 2, reverse=True)


def test_infinity_sorts_across_pages(server: Server) -> None:
    ids = [trial["id"] for trial in completed_search(server)]
    server.execute("UPDATE trials SET best_validation = NULL WHERE id <= 2")
    huge = "1e999" if server.services.database.sqlite else "'Infinity'::float8"
    server.execute(f"UPDATE trials SET best_validation = {huge} WHERE id BETWEEN 3 AND 6")
    for sort in ("best_validation", "-best_validation"):
        for condition in ({}, {"where": where_json(["id", ">", 0])}):
            numbers = [trial["id"] for trial in pages(server, sort=sort, **condition)]
            assert sorted(numbers) == ids, (sort, condition)
            assert set(numbers[-2:]) == {1, 2}


@pytest.mark.parametrize(
    ("conditions", "count"),
    [
        ([["hparams.word", "=", "a"]], 5),
        ([["hparams.word", "!=", "a"], ["hparams.optimizer.lr", "<", 0.1]], 2),
        ([["hparams.optimizer.lr", "in", [0.5, 0.3]]], 4),
        ([["best_validation", "<=", 0.1]], 6),
        ([["state", "contains", "complet"]], 10),
        ([["state", "=", "RUNNING"]], 0),
        ([["hparams.word", ">", 3]], 0),
        ([["restarts", "=", False]], 0),
        ([], 10),
    ],
)
def test_filtered_trials_are_counted_and_listed(
    shared_search: Server, conditions: list[Any], count: int
) -> None:
    rows = pages(shared_search, where=where_json(*conditions), sort="hparams.optimizer.lr")
    assert len(rows) == count
    assert len({trial["id"] for trial in rows}) == count
    path = "/experiments/1/columns"
    columns = shared_search.get(path, where=where_json(*conditions), column="id")["columns"]
    assert columns == {"id": sorted(trial["id"] for trial in rows)}
    state = {"state": "COMPLETED"} if count else {}
    for sort in ("-best_validation", "-hparams.optimizer.lr"):
        ways = [
            pages(shared_search, where=where_json(*conditions, *more), sort=sort, **params)
            for more, params in (((), {}), ((["id", ">", 0],), {}), ((), state))
        ]
        ids = [[trial["id"] for trial in way] for way in ways]
        assert len(ids[0]) == count
        assert ids[0] == ids[1] == ids[2], sort


@pytest.fixture(scope="module")
def shared_search(shared_server: Server) -> Server:
    completed_search(shared_server)
    return shared_server


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sort": "lr"}, "did you mean 'hparams.optimizer.lr'?"),
        ({"sort": "nonsense"}, "there are: id, state"),
        ({"where": "nonsense"}, "must be a JSON list"),
        ({"where": where_json(["word", "=", 1])}, "did you mean 'hparams.word'?"),
        ({"where": where_json(["id", "~", 1])}, "operators are"),
        ({"where": where_json(["id", "<", None])}, "needs a number"),
        ({"where": where_json(["id", "in", 3])}, "needs a list"),
        ({"where": where_json(*[["id", ">", 0]] * 101)}, "at most 100"),
        ({"where": "[" * 1000}, "must be a JSON list"),
        ({"sort": "slot_seconds", "after": "nonsense"}, "next_after of the page before"),
        ({"sort": "slot_seconds", "after": "[[1], 2]"}, "next_after of the page before"),
        ({"sort": "slot_seconds", "after": "[1, -2]"}, "next_after of the page before"),
    ],
)
def test_invalid_query_lists_choices(
    shared_search: Server, params: dict[str, str], message: str
) -> None:
    response = shared_search.http.get(f"{PREFIX}/experiments/1/trials", params=params)
    assert response.status_code == 422
    assert message in response.json()["error"]["problems"][0]


def test_query_errors_are_reported_together(shared_search: Server) -> None:
    params = {"sort": "x", "where": where_json(["y", "=", 1], ["z", "=", 1])}
    response = shared_search.http.get(f"{PREFIX}/experiments/1/trials", params=params)
    assert len(response.json()["error"]["problems"]) == 3


def test_unknown_column_lists_choices(shared_search: Server) -> None:
    params = {"column": ["word", "id"], "where": where_json(["y", "=", 1])}
    response = shared_search.http.get(f"{PREFIX}/experiments/1/columns", params=params)
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert len(problems) == 2
    assert "column: must be a column, got 'word'; did you mean 'hparams.word'?" in problems[0]


def test_page_of_trials_has_constant_queries(
    sqlite_server: Server,
) -> None:
    completed_search(sqlite_server)
    statements: list[str] = []

    @event.listens_for(sqlite_server.services.database._readers, "before_cursor_execute")
    def note(*arguments: Any) -> None:
        statements.append(arguments[2])

    counts = set()
    for limit in (1, 10):
        statements.clear()
        sqlite_server.get("/experiments/1/trials", limit=limit, sort="hparams.word")
        counts.add(len(statements))
    assert len(counts) == 1


def test_cost_counts_hostfile_slots(server: Server) -> None:
    folder = server.directory / "model"
    folder.mkdir(parents=True)
    (folder / "hosts").write_text("one slots=2\ntwo slots=3\n")
    resources = {"hostfile": "hosts", "exclude": "two:0"}
    server.submit(resources=resources)
    (job,) = server.get("/jobs")["jobs"]
    assert (job["slots_per_trial"], job["host_slots"]) == (1, 4)
    server.add_agent(slots=1)
    first = server.begin()
    server.report(first.run_id, training(50, 0.5))
    server.clock.now += 100
    assert server.trial()["slot_seconds"] == 400
    server.exit(first.run_id, 0)

    def preview(**resources: str) -> tuple[Any, ...]:
        body = {"config": experiment_config(resources=resources)}
        response = server.http.post("/api/v1/experiments/preview", json=body)
        row = response.json()["preview"]
        return row["like"], row["slots_per_trial"], row["slot_hours"]

    assert preview(**resources) == (1, 4, pytest.approx(100 * 2 * 4 / 3600))
    assert preview() == (None, 1, None)  # runs on other machines do not count


def test_cost_is_slots_times_duration(server: Server) -> None:
    server.submit(resources={"slots_per_trial": 2})
    assert server.trial()["slot_seconds"] == 0
    server.add_agent(slots=2)
    first = server.begin()
    server.clock.now += 30
    assert server.trial()["slot_seconds"] == 60
    server.exit(first.run_id, -9, "it broke")
    server.tick(1000)  # waits, and holds nothing
    second = server.begin()
    server.clock.now += 5
    server.report(second.run_id, validation(100, 1.0))
    server.exit(second.run_id, 0)
    server.clock.now += 1000
    assert server.trial()["slot_seconds"] == pytest.approx(70)
    assert server.get("/experiments/1/columns")["columns"]["slot_seconds"] == [pytest.approx(70)]


def test_clock_set_back_gives_no_negative_cost(server: Server) -> None:
    server.submit()
    server.add_agent()
    server.begin()
    server.clock.set_back = 86_400.0
    assert server.trial()["slot_seconds"] == 0


def test_columns_have_all_trials_and_hparams(server: Server) -> None:
    trials = completed_search(server)
    columns = server.get("/experiments/1/columns")["columns"]
    assert columns["id"] == [trial["id"] for trial in trials]
    assert columns["hparams.optimizer.lr"] == [t["hparams"]["optimizer"]["lr"] for t in trials]
    assert columns["best_validation"] == [trial["best_validation"] for trial in trials]
    assert columns["slot_seconds"] == [trial["slot_seconds"] for trial in trials]
    assert columns["slot_seconds"] == sorted(columns["slot_seconds"])


def test_metric_column_sorts_and_filters(server: Server) -> None:
    server.submit(searcher=SEARCHER, hyperparameters=GRID)
    server.add_agent(slots=10)
    losses: dict[int, tuple[float | None, float | None]] = {}
    for position, item in enumerate(server.work()):
        server.post(f"/runs/{item.run_id}/started", {})
        if position == 3:
            losses[item.spec.trial_id] = (None, None)
            continue
        peak = float(position * 7 % 10)
        last = "NaN" if position == 4 else -peak
        for step, value in ((5, 0.0), (10, peak), (15, last)):
            server.report(item.run_id, metrics("training", step, **{"a.b": value}))
        losses[item.spec.trial_id] = (peak, None if last == "NaN" else -peak)
    path = "/experiments/1/columns"
    names = ["id", "max.training.a.b", "last.training.a.b", "min.training.a.b"]
    cells = server.get(path, column=names)["columns"]
    rows = zip(*(cells[name] for name in names), strict=True)
    for trial_id, most, last, least in rows:
        assert (most, last) == losses[trial_id]
        assert least == (None if most is None else min(0.0, last or 0.0))
    ordered = [trial["id"] for trial in pages(server, sort="-max.training.a.b")]
    assert ordered == sorted(
        losses, key=lambda id_: (losses[id_][0] is None, -(losses[id_][0] or 0))
    )
    filtered = pages(server, where=where_json(["last.training.a.b", "<", -4]))
    assert [trial["id"] for trial in filtered] == [
        number for number, (_, last) in losses.items() if last is not None and last < -4
    ]
    response = server.http.get(
        PREFIX + path, params={"column": [*names, "mean.x", "last.training.c"]}
    )
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert len(problems) == 2
    assert "mean.x" in problems[0]
    assert "must be a metric that was reported" in problems[1]


def test_hparams_are_flattened_to_dotted_names() -> None:
    tree = {
        "a": {"b": 1, "none": None, "flag": True},
        "layers": [{"width": 8}, {"width": [1, 2]}],
        "betas": [0.9, 0.999],
        "empty": {},
        "no": [],
        "dotted.name": "x",
    }
    assert flatten_hparams(tree) == {
        "a.b": 1,
        "a.none": None,
        "a.flag": True,
        "layers.0.width": 8,
        "layers.1.width": "[1,2]",
        "betas": "[0.9,0.999]",
        "empty": "{}",
        "no": "[]",
        "dotted.name": "x",
    }


def test_best_so_far_is_cumulative_best(server: Server) -> None:
    server.submit(searcher=SEARCHER | {"max_concurrent_trials": 3}, hyperparameters=GRID)
    server.add_agent(slots=3)
    runs = server.work()
    for item in runs:
        server.post(f"/runs/{item.run_id}/started", {})
    reports = [
        (0, 5, "NaN"),
        (1, 5, 3.0),
        (2, 5, 4.0),
        (0, 10, 2.0),
        (1, 10, "-Infinity"),
        (2, 9, 1.0),
    ]
    for position, steps, loss in reports:
        server.clock.now += 1
        server.report(runs[position].run_id, validation(steps, loss))
    progress = server.get("/experiments/1/search-progress")
    assert progress["validations"] == 6
    better = [(row["trial_id"], row["length"], row["value"]) for row in progress["improvements"]]
    trial = [item.spec.trial_id for item in runs]
    assert better == [(trial[1], 5.0, 3.0), (trial[0], 10.0, 2.0), (trial[2], 9.0, 1.0)]
    times = [row["time"] for row in progress["improvements"]]
    assert times == sorted(times)


def test_importance_of_missing_experiment_is_404(server: Server) -> None:
    for path in ("columns", "search-progress", "importance"):
        assert server.http.get(f"{PREFIX}/experiments/7/{path}").status_code == 404


def made_rows(count: int, seed: int = 3) -> list[Row]:
    """Rows whose loss depends mostly on the learning rate, then on the optimizer, then on noise."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        rate, name = 10 ** chance.uniform(-4, 0), chance.choice(["adam", "sgd", "lion"])
        hparams = {"lr": rate, "opt": name, "idle": chance.random(), "fixed": 3}
        if name == "sgd":
            hparams["momentum"] = chance.random()
        loss = (math.log10(rate) + 2) ** 2 + {"adam": 0, "sgd": 0.3, "lion": 1.5}[name]
        rows.append(Row({"id": number, "best_validation": loss + chance.gauss(0, 0.1)}, hparams))
    return rows


def shares(result: ImportanceResult) -> dict[str, float]:
    return {name: share for name, share, _ in result.shares}


def test_importance_ranks_relevant_hparams_first() -> None:
    result = importance(made_rows(200), smaller_is_better=True)
    assert result.problem is None
    assert result.explained is not None
    assert result.explained > 0.8
    assert [name for name, *_ in result.shares][:2] == ["lr", "opt"]
    assert "fixed" not in shares(result)
    assert shares(result)["lr"] > 2 * shares(result)["opt"] > 20 * shares(result)["idle"]


def test_importance_estimates_total_variance_share() -> None:
    chance = random.Random(1)
    points = [(chance.random(), chance.random()) for _ in range(800)]
    rows = [
        Row({"id": i, "best_validation": 2 * x + y}, {"x": x, "y": y})
        for i, (x, y) in enumerate(points)
    ]
    result = shares(importance(rows, smaller_is_better=True))  # of 4 + 1 parts, nearly, as ranks
    assert result["x"] == pytest.approx(0.8, abs=0.06)
    assert result["y"] == pytest.approx(0.2, abs=0.06)


def test_importance_is_scale_invariant() -> None:
    rows = made_rows(100)
    other = []
    for row in rows:
        loss = row.values["best_validation"]
        assert isinstance(loss, float)
        other.append(row._replace(values=row.values | {"best_validation": -math.exp(3 * loss)}))
    first = importance(rows, smaller_is_better=True)
    assert shares(importance(other, smaller_is_better=False)) == shares(first)


def test_importance_of_noise_is_zero() -> None:
    chance = random.Random(5)
    rows = [
        Row({"id": i, "best_validation": chance.random()}, {"a": chance.random()})
        for i in range(100)
    ]
    result = importance(rows, smaller_is_better=True)
    assert result.explained is not None
    assert result.explained < 0.2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are 0"),
        (made_rows(MIN_TRIALS - 1), f"there are {MIN_TRIALS - 1}"),
        ([Row({"best_validation": float(i)}, {"a": 1}) for i in range(20)], "the same hyperparam"),
        ([Row({"best_validation": 1.0}, {"a": i}) for i in range(20)], "the same result"),
        ([Row({"best_validation": math.inf}, {"a": i}) for i in range(20)], "there are 0"),
        ([Row({"best_validation": None}, {"a": i}) for i in range(20)], "there are 0"),
    ],
)
def test_importance_requires_enough_trials(rows: list[Row], message: str) -> None:
    result = importance(rows, smaller_is_better=True)
    assert result.shares == []
    assert result.problem is not None
    assert message in result.problem


def test_mixed_value_types_are_categories() -> None:
    chance = random.Random(2)
    values = [1, True, "1", None, "x"]
    rows = []
    for number in range(100):
        value = values[number % 5]
        loss = float(number % 5) + chance.gauss(0, 0.1)
        rows.append(Row({"id": number, "best_validation": loss}, {"odd": value, "noise": number}))
    result = shares(importance(rows, smaller_is_better=True))
    assert result["odd"] > 0.8


def test_importance_is_cached_until_trials_change() -> None:
    cache = ImportanceCache()

    def compute(trials: int) -> ImportanceResult:
        return importance(made_rows(trials), smaller_is_better=True)

    async def ask() -> None:
        first = await cache.of(1, 7, partial(compute, 30))
        assert await cache.of(1, 7, partial(compute, 30)) is first
        assert await cache.of(1, 8, partial(compute, 31)) is not first

    asyncio.run(ask())


def test_importance_of_one_experiment_does_not_block_another() -> None:
    cache = ImportanceCache()
    started, release, computed = threading.Event(), threading.Event(), []

    def slow() -> ImportanceResult:
        computed.append(1)
        started.set()
        assert release.wait(DEADLINE_S)
        return ImportanceResult(1, None, [])

    async def ask() -> None:
        slow_ones = [asyncio.create_task(cache.of(1, 7, slow)) for _ in range(60)]
        assert await asyncio.to_thread(started.wait, DEADLINE_S)
        assert (await cache.of(2, 7, lambda: ImportanceResult(2, None, []))).trials == 2
        release.set()
        assert {result.trials for result in await asyncio.gather(*slow_ones)} == {1}

    asyncio.run(ask())
    assert computed == [1]


def test_columns_follow_new_and_deleted_trials(server: Server) -> None:
    custom = {"name": "custom", "metric": "loss", "max_length": 100}
    server.submit(searcher=custom)

    def create(after: int, *numbers: int) -> None:
        operations = [
            {
                "kind": "create",
                "trial_id": number,
                "hparams": {"lr": number / 10, f"only{number}": None},
            }
            for number in numbers
        ]
        body = {"after": after, "handled": max(after, 0), "operations": operations}
        server.post("/experiments/1/searcher/operations", body)

    def lr() -> Any:
        return server.get("/experiments/1/columns")["columns"]["hparams.lr"]

    create(-1, 1, 2)
    assert lr() == [0.1, 0.2]
    create(0, 3)
    assert lr() == [0.1, 0.2, 0.3]
    condition = json.dumps([["hparams.lr", ">", 0.15]])
    result = server.get("/experiments/1/columns", where=condition, column=["id", "hparams.only3"])
    assert result["columns"] == {"id": [2, 3], "hparams.only3": [None, None]}
    server.act("kill")
    server.request("DELETE", "/trials/2")
    assert lr() == [0.1, 0.3]
    response = server.http.get("/api/v1/experiments/1/columns", params={"column": "hparams.only2"})
    assert response.status_code == 422


def test_importance_states_method_and_limits(server: Server) -> None:
    completed_search(server)
    result = server.get("/experiments/1/importance")
    assert result["trials"] == 10
    assert result["problem"] is None
    assert {share["name"] for share in result["shares"]} == {"optimizer.lr", "word"}
    assert result["shares"][0]["name"] == "optimizer.lr"
    assert "Permutation importance" in result["method"]
    assert "It shows correlation, not cause" in result["method"]


def test_metrics_of_experiments_use_best_trial(server: Server) -> None:
    completed_search(server)
    server.submit()  # has reported nothing
    result = server.get("/experiments/columns", column=["id", "last.validation.loss"])
    assert result["columns"] == {"id": [1, 2], "last.validation.loss": [0.001, None]}
    assert {"group": "validation", "name": "loss"} in result["names"]
    server.execute("UPDATE experiments SET best_trial_id = NULL")  # the first one is used
    result = server.get("/experiments/columns", column="min.validation.loss")["columns"]
    first = server.trials()[0]["hparams"]["optimizer"]["lr"]
    assert first != 0.001
    assert result["min.validation.loss"] == [first, None]


def test_unreported_metric_is_rejected(server: Server) -> None:
    completed_search(server)
    assert server.get("/experiments/columns")["columns"] == {"id": [1]}
    wrong = ["state", "last.validation.los", "last.validation.loss"]
    response = server.http.get(f"{PREFIX}/experiments/columns", params={"column": wrong})
    assert response.status_code == 422
    problems = response.json()["error"]["problems"]
    assert len(problems) == 2, problems
    assert all("must be a metric that was reported" in problem for problem in problems)
    assert "'state'" in problems[0]
    assert "'last.validation.los'" in problems[1]
