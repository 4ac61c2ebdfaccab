"""Searches that are continued with greater limits, and their replay."""

import math
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import pytest

from tests.searcher.test_invariants import SPACE, Platform, apply_event
from zerolab.searcher import Continue, Create, Operation, Reopen, Searcher, Shutdown, Stop
from zerolab.searcher.factory import make_searcher, read_section
from zerolab.searcher.section import SearcherConfig

HALVING: dict[str, Any] = {"name": "async_halving", "num_rungs": 3, "divisor": 3, "max_trials": 9}
BLOCKS: dict[str, dict[str, Any]] = {
    "stopping": HALVING,
    "promoting": {**HALVING, "stop_once": False},
    "adaptive": {"name": "adaptive_asha", "divisor": 3, "max_trials": 9, "mode": "conservative"},
    "adaptive, promoting": {
        "name": "adaptive_asha", "divisor": 2, "max_trials": 9, "stop_once": False,
    },
    "tpe_asha": {"name": "tpe_asha", "max_trials": 9},
    "pbt": {"name": "pbt", "population_size": 4, "num_rounds": 3},
}  # fmt: skip


def section(name: str, **over: Any) -> SearcherConfig:
    base = {"metric": "loss", "max_concurrent_trials": 3, "max_length": 27}
    return read_section({**base, **BLOCKS[name], **over})


class GrowingPlatform(Platform):
    """Platform on which trials report at every rung, and whose search can grow."""

    def __init__(self, config: SearcherConfig, seed: int = 5) -> None:
        self.config = config
        super().__init__(make_searcher(config, SPACE, seed), config.max_concurrent_trials, 27)
        self.ever: set[int] = set()

    def grow(self, config: SearcherConfig, lost: Collection[int] = ()) -> list[Operation]:
        extended = config.with_derived_fields(self.config)
        assert not list(extended.growth_problems(self.config))
        self.config, self.length, self.over = extended, extended.length, 0
        operations = extended.grow(self.searcher, lost)
        for operation in operations:
            if isinstance(operation, Reopen):
                assert operation.trial_id in self.ended, "it has not ended"
                self.ended.discard(operation.trial_id)
                self.paused.add(operation.trial_id)
        self.events.append(("grown", extended, lost))
        self._perform([operation for operation in operations if not isinstance(operation, Reopen)])
        self.operations[-1] = operations
        return operations

    def live(self, values: Random, *, failing: float = 0.0) -> None:
        """Run random events until the search is over."""
        for _ in range(3000):
            everyone = sorted(self.training | self.stopping)
            if not everyone:
                return
            trial_id = values.choice(everyone)
            if trial_id in self.stopping:
                self.end(trial_id, "done")
            elif values.random() < failing:
                self.end(trial_id, "errored")
            else:
                self.train(trial_id, values.random())
        raise AssertionError("the search does not end")

    def train(self, trial_id: int, metric: float) -> None:
        due = min(self.until.get(trial_id, self.length), self.length)
        stops = [at for at in self.config.validate_at() if at > self.trained[trial_id]]
        length = min([due, *stops])
        self.trained[trial_id] = length
        if length >= due and length < self.length:
            self.training.discard(trial_id)
            self.paused.add(trial_id)
        self.send_event("validated", trial_id, metric, length)
        if length >= self.length and trial_id in self.training:
            self.end(trial_id, "done")


def dumped(config: SearcherConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", BLOCKS)
def test_grown_search_ends_and_replays(name: str, seed: int) -> None:
    values = Random(seed)
    platform = GrowingPlatform(section(name))
    first = platform.config
    platform.live(values, failing=0.02)
    assert platform.over == 1
    times = 2 if name == "pbt" else int(getattr(first, "divisor", 3))
    changes = [{"max_length": 27 * times}, {"max_length": 27 * times**2}]
    if name != "pbt":
        changes.insert(0, {"max_trials": 24})
    for change in changes:
        platform.grow(read_section({**dumped(platform.config), **change}))
        platform.live(values, failing=0.02)
        assert platform.over == 1
        if name != "pbt":
            assert len(platform.trained) >= 24
    longer = platform.config.length
    assert platform.over == 1
    assert platform.ended == set(platform.trained)
    assert max(platform.trained.values()) == longer, "no trial reached the new top"
    replayed = [(again := make_searcher(first, SPACE, 5)).initial_operations()]
    replayed += [replay(again, event) for event in platform.events]
    assert replayed == platform.operations


def replay(searcher: Searcher, event: tuple[Any, ...]) -> list[Operation]:
    if event[0] == "grown":
        operations: list[Operation] = event[1].grow(searcher, event[2])
        return operations
    return apply_event(searcher, event)


def drive(platform: GrowingPlatform, value: Callable[[int], float]) -> GrowingPlatform:
    """Train the oldest open trial until the search is over."""
    while platform.training or platform.stopping:
        if platform.stopping:
            platform.end(min(platform.stopping), "done")
        else:
            trial_id = min(platform.training)
            platform.train(trial_id, value(trial_id))
    assert platform.over == 1
    return platform


def finished(name: str, **over: Any) -> GrowingPlatform:
    """Return an ended search in which younger trials are better."""
    return drive(GrowingPlatform(section(name, **over)), lambda trial_id: 1 / trial_id)


def reopened(operations: list[Operation]) -> list[int]:
    return [operation.trial_id for operation in operations if isinstance(operation, Reopen)]


def test_more_trials_promote_stopped_ones() -> None:
    platform = drive(GrowingPlatform(section("promoting", max_concurrent_trials=1)), float)
    # Nine reached 3, the three oldest of them 9, the first 27.
    assert [platform.trained[trial_id] for trial_id in range(1, 10)] == [27, 9, 9] + [3] * 6
    operations = platform.grow(section("promoting", max_trials=24, max_concurrent_trials=1))
    assert reopened(operations) == list(range(2, 10))
    assert [type(operation) for operation in operations if not isinstance(operation, Reopen)] == [
        Create,
        Continue,
    ]
    drive(platform, float)
    assert [platform.trained[trial_id] for trial_id in range(1, 10)] == [27, 27] + [9] * 6 + [3]
    assert len(platform.trained) == 24


@pytest.mark.needs_extension("tpe_asha", "pbt")
def test_greater_length_adds_a_rung() -> None:
    for name in ("stopping", "promoting", "adaptive"):
        old, new = section(name), section(name, max_length=81)
        extended = new.with_derived_fields(old)
        assert set(extended.validate_at()) == {*old.validate_at(), 81}
        assert not list(extended.growth_problems(old))
    old = section("tpe_asha")
    longer = section("tpe_asha", max_length=81).with_derived_fields(old)
    assert (old.validate_at(), longer.validate_at()) == ((1, 3, 9, 27), (3, 9, 27, 81))
    pbt = section("pbt", max_length=45).with_derived_fields(section("pbt"))
    assert pbt.validate_at() == (9, 18, 27, 36, 45)
    assert section("pbt", num_rounds=5).with_derived_fields(section("pbt")).length == 45


@pytest.mark.parametrize("name", ["stopping", "promoting", "tpe_asha"])
def test_best_of_former_top_continue_to_new_top(name: str) -> None:
    platform = finished(name)
    top = [trial_id for trial_id, done in platform.trained.items() if done == 27]
    operations = platform.grow(section(name, max_length=81))
    assert not any(isinstance(operation, Create) for operation in operations)
    going_on = [operation for operation in operations if isinstance(operation, Continue)]
    if (
        len(top) < 3 and name != "stopping"
    ):  # fewer than three candidates: only the best is promoted
        assert len(going_on) == 1
    assert {operation.trial_id for operation in going_on} <= set(top)
    assert going_on[0] == Continue(max(top), 81)
    drive(platform, lambda trial_id: 0.0)
    assert platform.trained[max(top)] == 81


@pytest.mark.needs_extension("pbt")
def test_population_continues_after_last_round() -> None:
    platform = finished("pbt", replace_function={"truncate_fraction": 0.25})
    operations = platform.grow(
        section("pbt", num_rounds=4, replace_function={"truncate_fraction": 0.25})
    )
    back = reopened(operations)
    assert len(back) == 4
    (copy,) = (operation for operation in operations if isinstance(operation, Create))
    assert copy.source == max(back), "of the best"
    (stop,) = (operation for operation in operations if isinstance(operation, Stop))
    assert stop.trial_id == min(back), "for the worst"


@pytest.mark.parametrize("name", BLOCKS)
def test_trial_without_checkpoint_stays_ended(name: str) -> None:
    platform = finished(name)
    lost = set(platform.trained)
    longer = section(name, num_rounds=4) if name == "pbt" else section(name, max_trials=24)
    operations = platform.grow(longer, lost)
    assert not reopened(operations)
    if name == "pbt":  # no source for copies is left
        assert [type(operation) for operation in operations] == [Shutdown]
    else:
        platform.live(Random(1))
        assert platform.over == 1


def test_failed_trial_is_not_reopened() -> None:
    platform = GrowingPlatform(section("promoting", max_concurrent_trials=9))
    for trial_id in range(1, 10):
        platform.train(trial_id, math.nan if trial_id == 1 else trial_id / 10)
    platform.live(Random(0))
    operations = platform.grow(section("promoting", max_trials=30, max_concurrent_trials=9))
    assert 1 not in reopened(operations)


@pytest.mark.parametrize(
    ("name", "over", "message"),
    [
        ("stopping", {"max_length": 28}, "must be 27 times a power of the divisor (81, 243, ...)"),
        ("stopping", {"num_rungs": 3}, ""),
        ("stopping", {"num_rungs": 4}, "searcher.num_rungs: must be 3, which follows from max_"),
        ("adaptive", {"bracket_rungs": [2]}, "searcher.bracket_rungs: must be [3, 2, 1], which"),
        ("stopping", {"max_length": 81, "num_rungs": 5}, "the rungs of earlier comparisons stay"),
        ("adaptive", {"max_length": 100}, "must be 27 times a power of the divisor"),
        ("adaptive", {"max_trials": 8}, "searcher.max_trials: must be at least 9 as before, got 8"),
        ("tpe_asha", {"max_length": 54}, "must be 3, 9 or 27 times the 27 batches before (81"),
        ("pbt", {"max_length": 40}, "must be a multiple of the 9 batches that a round has, got 40"),
        ("pbt", {"max_length": 18}, "must be at least 27 batches as before, got 18 batches"),
    ],
)  # fmt: skip
def test_invalid_growth_is_rejected(name: str, over: dict[str, Any], message: str) -> None:
    before = section(name)
    problems = list(section(name, **over).with_derived_fields(before).growth_problems(before))
    if message:
        assert message in problems[0]
    else:
        assert problems == []
