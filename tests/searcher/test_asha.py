"""ASHA and adaptive ASHA against the published arithmetic, in tables worked out by hand."""

import math
from typing import Any

import pytest

from zerolab.errors import ConfigError
from zerolab.searcher import Continue, Create, Operation, Shutdown, Stop, make_searcher
from zerolab.searcher.asha import Bracket, make_brackets, make_rungs, simulate
from zerolab.searcher.factory import read_section
from zerolab.searcher.view import HasView

SPACE: dict[str, Any] = {"lr": {"type": "log", "minval": -4, "maxval": -1}}


@pytest.mark.parametrize(
    ("num_rungs", "divisor", "max_time", "rungs"),
    [
        (1, 4, 100, [100]),
        (3, 3, 900, [100, 300, 900]),
        (4, 3, 27, [1, 3, 9, 27]),
        (5, 4, 1000, [3, 15, 62, 250, 1000]),  # 1000 / 256 = 3.9, 1000 / 64 = 15.6, 62.5
        (3, 2.5, 100, [16, 40, 100]),
        (5, 4, 27, [1, 1, 1, 6, 27]),  # 27 / 256, 27 / 64 = 0.4 and 27 / 16 = 1.7, but at least 1
        (3, 10, 5, [1, 1, 5]),
    ],
)
def test_rungs(num_rungs: int, divisor: float, max_time: int, rungs: list[int]) -> None:
    assert make_rungs(num_rungs, divisor, max_time) == rungs


@pytest.mark.parametrize(
    ("settings", "brackets"),
    [
        # rungs_max = min(10, 7, 3); 2 and 3 rungs; weights 3^2 / 3 = 3 and 3^1 / 2 = 1.5, so
        # floor(3 / 4.5 * 10) = 6 and floor(1.5 / 4.5 * 10) = 3 trials, the rest of 1 to the first.
        (
            {"max_time": 900, "divisor": 3, "max_rungs": 10, "max_trials": 10,
             "max_concurrent_trials": 5},
            [(3, 7, 3), (2, 3, 2)],
        ),
        (
            {"max_time": 900, "divisor": 3, "max_rungs": 10, "max_trials": 10, "mode": "aggressive",
             "max_concurrent_trials": 5},
            [(3, 10, 5)],
        ),
        # weights 3, 1.5 and 3^0 / 1 = 1 of 5.5: 5.4, 2.7 and 1.8 trials, the rest of 2 to the
        # first.
        (
            {"max_time": 900, "divisor": 3, "max_rungs": 10, "max_trials": 10,
             "mode": "conservative", "max_concurrent_trials": 5},
            [(3, 7, 2), (2, 2, 2), (1, 1, 1)],
        ),
        # rungs_max = min(5, floor(ln 1000 / ln 4) + 1 = 5, floor(ln 100 / ln 4) + 1 = 4); 2 to 4
        # rungs; weights 16, 16 / 3 and 2 of 23.33: 68.57, 22.86 and 8.57 trials; 16 = 6 + 5 + 5.
        ({"max_time": 1000, "max_trials": 100}, [(4, 70, 6), (3, 22, 5), (2, 8, 5)]),
        # Without a bound, each bracket has as many at a time as the last one has trials.
        (
            {"max_time": 1000, "max_trials": 100, "max_concurrent_trials": 0},
            [(4, 70, 8), (3, 22, 8), (2, 8, 8)],
        ),
        # Fewer at a time than brackets: each bracket has one.
        (
            {"max_time": 1000, "max_trials": 100, "max_concurrent_trials": 2},
            [(4, 70, 1), (3, 22, 1), (2, 8, 1)],
        ),
        ({"max_time": 1000, "max_trials": 1}, [(1, 1, 16)]),
        ({"max_time": 1, "max_trials": 50}, [(1, 50, 16)]),
        (
            {"max_time": 100, "max_trials": 10, "bracket_rungs": [1, 3], "divisor": 2,
             "max_concurrent_trials": 2},
            [(3, 6, 1), (1, 4, 1)],  # weights 4 / 3 and 1 of 7 / 3: 5.7 and 4.3, the rest of 1
        ),
    ],
)  # fmt: skip
def test_brackets(settings: dict[str, Any], brackets: list[tuple[int, int, int]]) -> None:
    assert make_brackets(**settings) == [Bracket(*bracket) for bracket in brackets]


def test_simulate_counts_trials_per_length() -> None:
    # 7 trials: 5 end at 100, 1 at 300, 1 at 900; 3 trials: 2 end at 300, 1 at 900.
    brackets = [Bracket(3, 7, 3), Bracket(2, 3, 2)]
    assert simulate(brackets, 3, 900) == {100: 5, 300: 3, 900: 2}
    assert simulate([Bracket(4, 27, 27)], 3, 27) == {1: 18, 3: 6, 9: 2, 27: 1}
    assert simulate([Bracket(1, 5, 5)], 4, 10) == {10: 5}
    assert simulate([Bracket(5, 1, 1)], 4, 10) == {10: 1}


def halving(**more: Any) -> dict[str, Any]:
    return {
        "name": "async_halving", "metric": "loss", "num_rungs": 3, "divisor": 3,
        "max_time": 9, "time_metric": "epochs", "max_trials": 9, "max_concurrent_trials": 9, **more,
    }  # fmt: skip


def kinds(operations: list[Operation]) -> list[Any]:
    """Return operations in short form: a trial's number for a new one."""
    short = []
    for operation in operations:
        match operation:
            case Create():
                short.append(operation.trial_id)
            case Continue():
                short.append((operation.trial_id, operation.until))
            case Stop():
                short.append(-operation.trial_id)
            case Shutdown():
                short.append("over")
    return short


def test_stopping_keeps_the_best_third_and_at_least_one() -> None:
    searcher = make_searcher(halving(), SPACE, 0)
    assert kinds(searcher.initial_operations()) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    # (trial, metric) at rung 1, in turn; stopped if position >= max(floor(n / 3), 1)
    table = [
        (1, 0.5, []),  # the first one always continues
        (2, 0.6, [-2]),  # position 1 of 2, one survives
        (3, 0.4, []),  # position 0 of 3
        (4, 0.45, [-4]),  # position 1 of 4, one survives
        (5, 0.44, [-5]),  # position 1 of 5
        (6, 0.42, []),  # position 1 of 6, two survive
        (7, 0.4, []),  # position 1 of 7: as good as trial 3, which is older
        (8, 0.4, [-8]),  # position 2 of 8, two survive
        (9, math.nan, [-9]),  # last
    ]
    for trial_id, metric, expected in table:
        assert kinds(searcher.validation_completed(trial_id, metric, 1)) == expected, trial_id
    # At rung 3 the best of one continues, then position 0 of 2.
    assert kinds(searcher.validation_completed(1, 0.3, 3)) == []
    assert kinds(searcher.validation_completed(3, 0.35, 2)) == []  # not there yet
    assert kinds(searcher.validation_completed(3, 0.35, 3)) == [-3]
    assert kinds(searcher.validation_completed(6, 0.1, 9)) == [-6]  # rungs 3 and 9 at once
    assert kinds(searcher.validation_completed(1, 0.2, 9)) == [-1]


def test_equal_metrics_stop_the_younger_trials() -> None:
    searcher = make_searcher(halving(), SPACE, 0)
    searcher.initial_operations()
    stopped = [kinds(searcher.validation_completed(i, 1.0, 1)) == [-i] for i in range(1, 10)]
    assert stopped == [False, True, True, True, True, True, True, True, True]


def test_larger_metric_is_better_if_configured() -> None:
    searcher = make_searcher(halving(smaller_is_better=False), SPACE, 0)
    searcher.initial_operations()
    assert kinds(searcher.validation_completed(1, 0.5, 1)) == []
    assert kinds(searcher.validation_completed(2, 0.4, 1)) == [-2]
    assert kinds(searcher.validation_completed(3, 0.6, 1)) == []


def test_stopped_trial_frees_place_once() -> None:
    searcher = make_searcher(halving(max_concurrent_trials=2), SPACE, 0)
    assert kinds(searcher.initial_operations()) == [1, 2]
    searcher.validation_completed(1, 0.1, 1)
    assert kinds(searcher.validation_completed(2, 0.2, 1)) == [-2]
    assert kinds(searcher.validation_completed(2, 0.05, 2)) == []  # it may report until it exits
    assert kinds(searcher.trial_exited(2)) == [3]
    assert kinds(searcher.trial_exited(2)) == []


def test_promoting_pauses_all_and_promotes_best_third() -> None:
    searcher = make_searcher(halving(stop_once=False, max_concurrent_trials=2), SPACE, 0)
    assert kinds(searcher.initial_operations()) == [1, (1, 1), 2, (2, 1)]
    table = [
        (1, 0.5, 1, [3, (3, 1)]),
        (2, 0.4, 1, [4, (4, 1)]),
        (3, 0.6, 1, [(2, 3)]),  # three at rung 1: the best is promoted
        (4, 0.3, 1, [(4, 3)]),  # four: another trial is the best now
        (4, 0.2, 3, [5, (5, 1)]),  # one at rung 3: no promotion
        (5, 0.7, 1, [6, (6, 1)]),
        (6, 0.8, 1, [7, (7, 1)]),  # six: the best two, 4 and 2, were promoted
        (7, 0.1, 1, [(7, 3)]),  # seven: the best two are 7 and 4
        (2, 0.25, 3, [8, (8, 1)]),  # two at rung 3: no promotion
        (8, 0.9, 1, [9, (9, 1)]),
    ]
    for trial_id, metric, length, expected in table:
        operations = kinds(searcher.validation_completed(trial_id, metric, length))
        assert operations == expected, trial_id
    # Three at rung 3: 4, 2 and 7; the best is promoted before any trial at rung 1.
    assert kinds(searcher.validation_completed(7, 0.05, 3)) == [(7, 9)]
    assert kinds(searcher.validation_completed(9, math.nan, 1)) == [-9]  # never promoted
    assert kinds(searcher.trial_exited(9)) == []  # nine at rung 1: 7, 4 and 2 have exited
    # After the top nothing trains or can be promoted: paused trials are stopped.
    assert kinds(searcher.validation_completed(7, 0.04, 9)) == [-7]
    ended = kinds(searcher.trial_exited(7))
    assert ended == [-1, -2, -3, -4, -5, -6, -8]
    last_operations = [kinds(searcher.trial_exited(-stopped)) for stopped in ended]
    assert last_operations == [[]] * 6 + [["over"]]
    assert searcher.progress() == 1.0


def test_few_trials_still_reach_the_top() -> None:
    searcher = make_searcher(halving(stop_once=False, max_trials=2), SPACE, 0)
    searcher.initial_operations()
    assert kinds(searcher.validation_completed(1, 0.5, 1)) == []
    assert kinds(searcher.validation_completed(2, 0.4, 1)) == [(2, 3)]
    assert kinds(searcher.validation_completed(2, 0.4, 3)) == [(2, 9)]
    assert kinds(searcher.validation_completed(2, 0.4, 9)) == [-2]


def test_trial_past_its_rung_is_judged_by_last_report() -> None:
    searcher = make_searcher(halving(stop_once=False, max_trials=3), SPACE, 0)
    searcher.initial_operations()
    searcher.validation_completed(1, 0.5, 1)
    searcher.validation_completed(2, 0.6, 1)
    # It ran on to the end of its training by itself: it need not train for any rung.
    assert kinds(searcher.validation_completed(3, 0.1, 9)) == [-3]


def test_rungs_of_equal_length_need_no_training() -> None:
    config = halving(stop_once=False, max_trials=3, max_time=5, divisor=10)  # rungs 1, 1, 5
    searcher = make_searcher(config, SPACE, 0)
    searcher.initial_operations()
    for trial_id, metric in ((1, 0.3), (2, 0.2)):
        assert kinds(searcher.validation_completed(trial_id, metric, 1)) == []
    assert kinds(searcher.validation_completed(3, 0.1, 1)) == [(3, 5)]


def test_invalid_trials_are_replaced_and_errors_rank_last() -> None:
    searcher = make_searcher(halving(max_concurrent_trials=2), SPACE, 0)
    searcher.initial_operations()
    assert kinds(searcher.trial_exited_early(1, "invalid_hp")) == [3]
    assert kinds(searcher.trial_exited_early(2, "errored")) == [4]
    assert isinstance(searcher, HasView)
    (entry,) = searcher.view().brackets[0].rungs[0].entries
    assert (entry.trial_id, entry.metric, entry.state) == (2, None, "failed")
    assert kinds(searcher.validation_completed(3, math.nan, 1)) == [-3]  # both rank last: by age
    assert kinds(searcher.validation_completed(4, 5.0, 1)) == []


def test_view_shows_state_of_trials() -> None:
    searcher = make_searcher(halving(stop_once=False, max_concurrent_trials=2), SPACE, 0)
    searcher.initial_operations()
    for trial_id, metric in ((1, 0.5), (2, 0.4), (3, 0.6)):
        searcher.validation_completed(trial_id, metric, 1)
    assert isinstance(searcher, HasView)
    (bracket,) = searcher.view().brackets
    assert bracket.trials == 9
    assert [rung.length for rung in bracket.rungs] == [1, 3, 9]
    assert [rung.training for rung in bracket.rungs] == [(4,), (2,), ()]
    first = [(entry.trial_id, entry.metric, entry.state) for entry in bracket.rungs[0].entries]
    assert first == [(2, 0.4, "promoted"), (1, 0.5, "paused"), (3, 0.6, "paused")]


def test_adaptive_asha_brackets_are_independent() -> None:
    config = {
        "name": "adaptive_asha", "metric": "loss", "divisor": 3, "max_time": 900, "max_trials": 10,
        "time_metric": "batches", "max_rungs": 10, "max_concurrent_trials": 5,
    }  # fmt: skip
    searcher = make_searcher(config, SPACE, 0)
    assert kinds(searcher.initial_operations()) == [1, 2, 3, 4, 5]  # 1 to 3, and 4 and 5
    assert kinds(searcher.validation_completed(1, 0.1, 100)) == []
    assert kinds(searcher.validation_completed(2, 0.2, 100)) == [-2]
    assert kinds(searcher.validation_completed(4, 0.9, 100)) == []  # its first rung is 300
    assert kinds(searcher.validation_completed(4, 0.9, 300)) == []  # the first one there
    assert kinds(searcher.validation_completed(5, 0.95, 300)) == [-5]
    assert kinds(searcher.trial_exited(2)) == [6]
    assert isinstance(searcher, HasView)
    assert [bracket.trials for bracket in searcher.view().brackets] == [7, 3]
    assert searcher.view().brackets[0].rungs[0].training == (3, 6)
    assert kinds(searcher.trial_exited(5)) == [7]
    assert searcher.view().brackets[1].rungs[0].training == (7,)


def test_concurrency_below_number_of_brackets() -> None:
    config = {
        "name": "adaptive_asha", "metric": "loss", "max_length": {"batches": 1000},
        "max_trials": 100, "max_concurrent_trials": 2,
    }  # fmt: skip
    assert kinds(make_searcher(config, SPACE, 0).initial_operations()) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_time": None, "time_metric": None}, "searcher.max_time: is required"),
        ({"time_metric": None}, "searcher.time_metric: is required with max_time"),
        ({"max_time": None}, "searcher.max_time: is required with time_metric"),
        ({"max_length": 8}, "searcher.max_length: must not be another length than max_time"),
        ({"time_metric": "seconds"}, "searcher.time_metric: must be 'batches' or 'epochs'"),
        ({"divisor": 1}, "searcher.divisor: must be greater than 1"),
        ({"num_rungs": 0}, "searcher.num_rungs: must be greater than 0"),
    ],
)
def test_invalid_block_is_rejected(changes: dict[str, Any], problem: str) -> None:
    block = {key: value for key, value in halving(**changes).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        make_searcher(block, SPACE, 0)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("divisor", [1.0001, 1000])
@pytest.mark.parametrize("max_time", [1, 2**53])
def test_extreme_settings_are_computed(divisor: float, max_time: int) -> None:
    shared = {
        "metric": "loss", "divisor": divisor, "max_time": max_time, "time_metric": "batches",
        "max_trials": 100_000,
    }  # fmt: skip
    blocks: list[dict[str, Any]] = [
        {"name": "async_halving", "num_rungs": 100},
        {"name": "adaptive_asha", "max_rungs": 100, "mode": "conservative"},
        {"name": "adaptive_asha", "bracket_rungs": [100] * 100},
    ]
    for block in blocks:
        section = read_section(shared | block)
        assert sum(section.forecast({}).values()) >= 100_000
        assert section.make(SPACE, 0).initial_operations()
