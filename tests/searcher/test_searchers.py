from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.errors import ConfigError
from zerolab.searcher import Create, Operation, Searcher, Shutdown, make_searcher

SPACE: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "net": {"width": {"type": "int", "minval": 1, "maxval": 9, "count": 3}, "act": "relu"},
    "drop": [{"type": "double", "minval": 0, "maxval": 1}, 0.5],
}
REASONS = ("errored", "invalid_hp", "user_canceled", "")


def random_config(trials: int, concurrent: int) -> dict[str, Any]:
    return {
        "name": "random",
        "metric": "loss",
        "max_length": 10,
        "max_trials": trials,
        "max_concurrent_trials": concurrent,
    }


def end(searcher: Searcher, trial_id: int, reason: str) -> list[Operation]:
    return (
        searcher.trial_exited_early(trial_id, reason) if reason else searcher.trial_exited(trial_id)
    )


def created(operations: list[Operation]) -> list[int]:
    return [operation.trial_id for operation in operations if isinstance(operation, Create)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 4), st.integers(0, 99), st.data())
def test_random_search_keeps_limits_and_ends_once(
    trials: int, concurrent: int, seed: int, data: st.DataObject
) -> None:
    searcher = make_searcher(random_config(trials, concurrent), SPACE, seed)
    operations = searcher.initial_operations()
    seen, open_ids, shutdowns, invalid = list(created(operations)), set(created(operations)), 0, 0
    while open_ids:
        assert len(open_ids) <= (concurrent or trials)
        trial_id = data.draw(st.sampled_from(sorted(open_ids)))
        reason = data.draw(st.sampled_from(REASONS))
        invalid += reason == "invalid_hp"
        open_ids.remove(trial_id)
        operations = end(searcher, trial_id, reason)
        assert end(searcher, trial_id, "errored") == []  # a second report changes nothing
        open_ids |= set(created(operations))
        seen += created(operations)
        shutdowns += sum(isinstance(operation, Shutdown) for operation in operations)
        assert 0.0 <= searcher.progress() <= 1.0
    assert seen == list(range(1, len(seen) + 1))
    assert trials <= len(seen) <= trials + min(invalid, trials)
    assert shutdowns == 1
    assert searcher.progress() == 1.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 20), st.integers(0, 99), st.data())
def test_replayed_searcher_continues_alike(cut: int, seed: int, data: st.DataObject) -> None:
    config = random_config(6, 3)
    first, second = (make_searcher(config, SPACE, seed) for _ in range(2))
    open_ids = set(created(first.initial_operations()))
    events: list[tuple[int, str]] = []

    def replay() -> None:
        second.initial_operations()
        for trial_id, reason in events:
            second.validation_completed(trial_id, float("nan"), 5)
            end(second, trial_id, reason)

    for step in range(20):
        if step == cut:
            replay()
        if not open_ids:
            break
        trial_id = data.draw(st.sampled_from(sorted(open_ids)))
        reason = data.draw(st.sampled_from(REASONS))
        first.validation_completed(trial_id, float("nan"), 5)
        operations = end(first, trial_id, reason)
        events.append((trial_id, reason))
        if step >= cut:
            second.validation_completed(trial_id, float("nan"), 5)
            assert end(second, trial_id, reason) == operations
            assert second.progress() == first.progress()
        open_ids = (open_ids - {trial_id}) | set(created(operations))


def test_trials_depend_on_seed_not_on_key_order() -> None:
    reordered = {key: SPACE[key] for key in reversed(SPACE)}
    first = make_searcher(random_config(5, 0), SPACE, 7).initial_operations()
    again = make_searcher(random_config(5, 0), reordered, 7).initial_operations()
    other = make_searcher(random_config(5, 0), SPACE, 8).initial_operations()
    assert first == again
    assert first != other


def test_single_search_never_replaces_its_trial() -> None:
    searcher = make_searcher({"name": "single", "metric": "loss"}, {"lr": 0.1}, 0)
    (create,) = searcher.initial_operations()
    assert isinstance(create, Create)
    assert create.trial_id == 1
    assert create.hparams == {"lr": 0.1}
    assert 0 <= create.trial_seed < 2**31
    assert searcher.trial_created(1) == []
    assert searcher.trial_exited_early(1, "invalid_hp") == [Shutdown()]


def test_progress_follows_reports_of_open_trials() -> None:
    searcher = make_searcher(random_config(2, 0), {"lr": 0.1}, 0)
    searcher.initial_operations()
    searcher.validation_completed(1, 0.5, 5)
    assert searcher.progress() == 0.25
    searcher.validation_completed(1, 0.5, 4)
    assert searcher.progress() == 0.25
    assert searcher.trial_exited(1) == []
    assert searcher.progress() == 0.5
    assert searcher.validation_completed(1, 0.5, 10) == []
    assert searcher.validation_completed(99, 0.5, 10) == []
    assert searcher.progress() == 0.5
    assert searcher.trial_exited(2) == [Shutdown()]


def test_search_ends_when_all_trials_are_canceled() -> None:
    searcher = make_searcher(random_config(2, 1), {"lr": 0.1}, 0)
    searcher.initial_operations()
    assert created(searcher.trial_exited_early(1, "user_canceled")) == [2]
    assert searcher.trial_exited_early(2, "user_canceled") == [Shutdown()]


def test_grid_tries_every_combination_once() -> None:
    space = {
        "b": {"type": "categorical", "vals": ["x", "y"]},
        "a": {"n": {"type": "int", "minval": 1, "maxval": 2, "count": 5}},
        "c": [{"type": "double", "minval": 0, "maxval": 1, "count": 3}],
        "d": {"type": "log", "base": 10, "minval": -2, "maxval": 0, "count": 1},
        "e": 3,
    }
    config = {"name": "grid", "metric": "loss", "max_concurrent_trials": 0}
    operations = make_searcher(config, space, 0).initial_operations()
    hparams = [op.hparams for op in operations if isinstance(op, Create)]
    assert len(hparams) == 2 * 2 * 3
    assert {(h["b"], h["a"]["n"], h["c"][0]) for h in hparams} == {
        (b, n, c) for b in "xy" for n in (1, 2) for c in (0.0, 0.5, 1.0)
    }
    assert all(h["d"] == pytest.approx(0.1) and h["e"] == 3 for h in hparams)


@pytest.mark.parametrize(
    ("config", "space", "problem"),
    [
        ({"name": "random", "metric": "m"}, {}, "max_trials: is required"),
        (
            {"name": "hyperband", "metric": "m"},
            {},
            "name: must be one of single, random, grid, ",
        ),
        (
            {"name": "grid", "metric": "m"},
            {"lr": {"type": "double", "minval": 0, "maxval": 1}},
            "hyperparameters.lr.count: is required by the grid searcher",
        ),
    ],
)
def test_invalid_block_is_rejected(
    config: dict[str, Any], space: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_searcher(config, space, 0)
