"""``pbt``, rule by rule."""

import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.errors import ConfigError
from zerolab.searcher import (
    Continue,
    Create,
    ExitReason,
    Operation,
    Searcher,
    Shutdown,
    Stop,
    make_searcher,
)

SPACE: dict[str, Any] = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "width": {"type": "int", "minval": 1, "maxval": 9},
    "kind": {"type": "categorical", "vals": ["sgd", "adam"]},
    "momentum": {"type": "double", "minval": 0.1, "maxval": 0.99, "when": {"kind": "sgd"}},
    "seed": 3,
}


def pbt(
    space: dict[str, Any] = SPACE,
    *,
    population: int = 5,
    rounds: int = 3,
    concurrent: int = 0,
    truncate: float = 0.2,
    resample: float = 0.0,
    perturb: float = 0.2,
    seed: int = 0,
    **block: Any,
) -> Searcher:
    config = {
        "name": "pbt",
        "metric": "loss",
        "length_per_round": 10,
        "population_size": population,
        "num_rounds": rounds,
        "max_concurrent_trials": concurrent,
        "replace_function": {"truncate_fraction": truncate},
        "explore_function": {"resample_probability": resample, "perturb_factor": perturb},
        **block,
    }
    return make_searcher({k: v for k, v in config.items() if v is not None}, space, seed)


def report(searcher: Searcher, values: dict[int, float], length: float = 10) -> list[Operation]:
    """Report values, and immediately the end of each trial that is stopped."""
    waiting = deque(values.items())
    operations: list[Operation] = []
    while waiting:
        done = searcher.validation_completed(*waiting.popleft(), length)
        stops = deque(o.trial_id for o in done if isinstance(o, Stop))
        operations += done
        while stops:
            operations += searcher.trial_exited(stops.popleft())
    return operations


def creates(operations: list[Operation]) -> list[Create]:
    return [operation for operation in operations if isinstance(operation, Create)]


def test_first_round_trains_all_members() -> None:
    operations = pbt().initial_operations()
    assert [create.trial_id for create in creates(operations)] == [1, 2, 3, 4, 5]
    assert all(create.source is None for create in creates(operations))
    assert [o for o in operations if isinstance(o, Continue)] == [
        Continue(i, 10) for i in range(1, 6)
    ]


def test_round_replaces_worst_by_copies_of_best() -> None:
    searcher = pbt(population=5, truncate=0.4)
    searcher.initial_operations()
    values = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.3}
    operations = report(searcher, values)
    assert operations[:2] == [Stop(3), Stop(1)]
    copies = creates(operations)
    assert [(copy.trial_id, copy.source) for copy in copies] == [(6, 2), (7, 4)]
    assert [o for o in operations if isinstance(o, Continue)] == [
        Continue(6, 10), Continue(7, 10), Continue(2, 20), Continue(4, 20), Continue(5, 20),
    ]  # fmt: skip


def test_round_waits_for_last_member() -> None:
    searcher = pbt()
    searcher.initial_operations()
    assert report(searcher, {i: 0.1 * i for i in range(1, 5)}) == []
    assert searcher.validation_completed(5, 0.5, 9) == []
    assert searcher.validation_completed(5, 0.5, 10) != []


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.19, 0), (0.2, 1), (0.39, 1)])
def test_truncate_fraction_rounds_down(fraction: float, count: int) -> None:
    searcher = pbt(truncate=fraction)
    searcher.initial_operations()
    operations = report(searcher, {i: 0.1 * i for i in range(1, 6)})
    assert len(creates(operations)) == count


def test_ties_favour_older_trial_and_nan_ranks_last() -> None:
    searcher = pbt(population=4, truncate=0.25)
    searcher.initial_operations()
    operations = report(searcher, dict.fromkeys((4, 3, 2, 1), 0.5))
    assert operations[0] == Stop(4)
    assert creates(operations)[0].source == 1
    assert report(searcher, {1: math.nan, 2: 0.5, 3: 0.5}, 20) == []
    assert report(searcher, {5: 0.5})[0] == Stop(1)


def test_copy_is_perturbed_within_bounds() -> None:
    seen = set()
    for seed in range(30):
        searcher = pbt(seed=seed)
        first = {create.trial_id: create for create in creates(searcher.initial_operations())}
        (copy,) = creates(report(searcher, {i: 0.1 * i for i in range(1, 6)}))
        source = first[1].hparams
        assert copy.hparams["kind"] == source["kind"]
        assert ("momentum" in copy.hparams) == ("momentum" in source)
        assert copy.hparams["seed"] == 3
        for name, low, high in (("lr", 1e-4, 0.1), ("momentum", 0.1, 0.99)):
            if name in source:
                ends = [min(max(source[name] * f, low), high) for f in (0.8, 1.2)]
                assert any(copy.hparams[name] == pytest.approx(end) for end in ends)
                seen.add((name, copy.hparams[name] > source[name]))
        width = source["width"]
        ends = [max(math.floor(width * 0.8), 1), min(math.ceil(width * 1.2), 9)]
        assert copy.hparams["width"] in ends
    assert len(seen) == 4


def test_resampling_draws_from_whole_space() -> None:
    searcher = pbt(population=40, truncate=0.5, resample=1.0)
    first = {create.trial_id: create for create in creates(searcher.initial_operations())}
    copies = creates(report(searcher, {i: 0.01 * i for i in range(1, 41)}))
    assert len(copies) == 20
    far = [c for c in copies if not 0.5 < c.hparams["lr"] / first[c.source or 0].hparams["lr"] < 2]
    assert len(far) > 5
    assert {copy.hparams["kind"] for copy in copies} == {"sgd", "adam"}
    assert all(("momentum" in c.hparams) == (c.hparams["kind"] == "sgd") for c in copies)


def test_copies_start_before_sources_continue() -> None:
    searcher = pbt(population=4, concurrent=1, truncate=0.5)
    searcher.initial_operations()
    operations: list[Operation] = []
    for trial_id in range(1, 5):
        operations = searcher.validation_completed(trial_id, trial_id / 10, 10)
    assert operations == [Stop(3), Stop(4)]  # they hold their slots until they have ended
    assert searcher.trial_exited(3) == []
    begun = searcher.trial_exited(4)
    for trial_id in (5, 6, 1):
        begun += searcher.validation_completed(trial_id, 0.5, 20 if trial_id == 1 else 10)
    assert [o.trial_id for o in begun if isinstance(o, Continue)] == [5, 6, 1, 2]


def test_failed_member_is_always_replaced() -> None:
    searcher = pbt(truncate=0.0)
    searcher.initial_operations()
    searcher.trial_exited_early(2, ExitReason.ERRORED)
    operations = report(searcher, {1: 0.2, 3: 0.1, 4: 0.3, 5: 0.4})
    assert [(copy.trial_id, copy.source) for copy in creates(operations)] == [(6, 3)]
    assert not any(isinstance(operation, Stop) for operation in operations)


def test_invalid_hp_retries_from_same_source() -> None:
    searcher = pbt()
    searcher.initial_operations()
    (again,) = creates(searcher.trial_exited_early(1, ExitReason.INVALID_HP))
    assert (again.trial_id, again.source) == (6, None)
    operations = report(searcher, {i: i / 10 for i in range(2, 7)})
    (copy,) = creates(operations)
    assert (copy.trial_id, copy.source) == (7, 2)
    (again,) = creates(searcher.trial_exited_early(7, "invalid_hp"))
    assert (again.trial_id, again.source) == (8, 2)


def test_search_ends_when_all_members_failed() -> None:
    searcher = pbt(population=2)
    searcher.initial_operations()
    assert searcher.trial_exited_early(1, "errored") == []
    assert searcher.trial_exited_early(2, "errored") == [Shutdown()]
    assert searcher.progress() == 1.0


def test_last_round_stops_all_members() -> None:
    searcher = pbt(population=2, rounds=1)
    searcher.initial_operations()
    assert searcher.validation_completed(1, 0.5, 10) == [Stop(1)]
    assert searcher.validation_completed(2, 0.4, 10) == [Stop(2)]
    assert searcher.trial_exited(1) == []
    assert searcher.trial_exited(2) == [Shutdown()]


KINDS = ("validated", "validated", "validated", "early", "errored", "invalid_hp", "exited")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), st.data())
def test_random_events_keep_limits_and_replay(
    population: int, rounds: int, concurrent: int, data: st.DataObject
) -> None:
    def make() -> Searcher:
        return pbt(population=population, rounds=rounds, concurrent=concurrent, truncate=0.5)

    def apply_event(searcher: Searcher, trial_id: int, kind: str, value: float, at: float):
        if kind == "validated":
            return searcher.validation_completed(trial_id, value, at)
        if kind == "exited":
            return searcher.trial_exited(trial_id)
        return searcher.trial_exited_early(trial_id, kind)

    searcher = make()
    log = list(searcher.initial_operations())
    fresh = deque(log)
    events: list[tuple[int, str, float, float]] = []
    until: dict[int, int] = {}
    busy: set[int] = set()
    training: set[int] = set()
    ended: set[int] = set()
    stopping: deque[int] = deque()
    while True:
        while fresh:
            match fresh.popleft():
                case Create(trial_id, _, _, source):
                    assert source is None or source in until
                case Continue(trial_id, to):
                    assert trial_id not in training | ended
                    assert to > until.get(trial_id, 0)
                    until[trial_id] = to
                    training.add(trial_id)
                    busy.add(trial_id)
                case Stop(trial_id):
                    assert trial_id not in ended
                    stopping.append(trial_id)
        assert len(busy) <= (concurrent or population)
        if stopping and (not training or data.draw(st.booleans())):
            trial_id = stopping.popleft()
            event = (trial_id, "exited", 0.0, 0.0)
        elif training:
            trial_id = data.draw(st.sampled_from(sorted(training)))
            kind = data.draw(st.sampled_from(KINDS))
            at = until[trial_id] / 2 if kind == "early" else until[trial_id]
            value = data.draw(st.sampled_from([0.1, 0.2, math.nan]))
            event = (trial_id, "validated" if kind == "early" else kind, value, at)
            if kind != "early":
                training.discard(trial_id)
        else:
            break
        if event[1] != "validated":
            ended.add(trial_id)
        if trial_id not in training:
            busy.discard(trial_id)
        events.append(event)
        operations = apply_event(searcher, *event)
        log += operations
        fresh.extend(operations)
        assert 0.0 <= searcher.progress() <= 1.0
    assert [o for o in log if isinstance(o, Shutdown)] == [Shutdown()]
    assert log[-1] == Shutdown()
    assert searcher.progress() == 1.0
    again = make()
    replayed = list(again.initial_operations())
    for event in events:
        replayed += apply_event(again, *event)
        assert apply_event(again, *event) == []
    assert replayed == log


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"length_per_round": None}, "length_per_round: is required by the pbt searcher"),
        ({"max_length": 30}, "max_length: must not be combined with length_per_round"),
        (
            {"length_per_round": None, "max_length": 31},
            "max_length: must be a multiple of num_rounds = 3, got 31",
        ),
        (
            {"replace_function": {"truncate_fraction": 0.6}},
            "truncate_fraction: must be at most 0.5",
        ),
    ],
)
def test_invalid_block_is_rejected(block: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        pbt(**block)
