"""Invariants of every searcher under random events."""

import math
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from zerolab.searcher import Continue, Create, Operation, Searcher, Shutdown, Stop, make_searcher

SPACE: dict[str, Any] = {
    "lr": {"type": "log", "minval": -4, "maxval": -1},
    "kind": {"type": "categorical", "vals": ["a", "b"]},
    "slope": {"type": "double", "minval": 0, "maxval": 1, "when": {"kind": "b"}},
}

BLOCKS: dict[str, dict[str, Any]] = {
    "random": {"name": "random", "max_trials": 12, "max_length": 27},
    "stopping": {
        "name": "async_halving", "num_rungs": 4, "divisor": 3, "max_trials": 12, "max_length": 27,
    },
    "promoting": {
        "name": "async_halving", "num_rungs": 4, "divisor": 3, "max_trials": 12,
        "max_time": 27, "time_metric": "batches", "stop_once": False,
    },
    "adaptive": {
        "name": "adaptive_asha", "divisor": 3, "max_trials": 12, "max_length": 27,
        "mode": "conservative",
    },
    "adaptive, promoting": {
        "name": "adaptive_asha", "divisor": 2, "max_trials": 12, "max_length": 27,
        "stop_once": False,
    },
}  # fmt: skip

METRICS = st.one_of(st.integers(0, 3).map(float), st.sampled_from([math.nan, math.inf, -math.inf]))
ENDS = st.sampled_from(["report"] * 8 + ["errored", "invalid_hp", "user_canceled", "done"])

FIND = [Phase.explicit, Phase.reuse, Phase.generate]
"""Without shrinking: for a history of a hundred events it takes minutes and explains nothing."""

Event = tuple[Any, ...]


class Platform:
    """Server model that performs a searcher's operations.

    Args:
        searcher: Searcher under test.
        concurrent: Maximum number of trials that train at a time.
        length: Length of a trial.
    """

    def __init__(self, searcher: Searcher, concurrent: int, length: int) -> None:
        self.searcher = searcher
        self.concurrent = concurrent
        self.length = length
        self.events: list[Event] = []
        self.operations: list[list[Operation]] = []
        self.trained: dict[int, int] = {}
        self.until: dict[int, int] = {}
        self.training: set[int] = set()
        self.paused: set[int] = set()
        self.stopping: set[int] = set()
        self.leaving: set[int] = set()
        self.ended: set[int] = set()
        self.over = 0
        self._perform(searcher.initial_operations())

    def send_event(self, *event: Any) -> None:
        """Send an event to the searcher and perform its operations."""
        self.events.append(event)
        self._perform(apply_event(self.searcher, event))

    def _perform(self, operations: list[Operation]) -> None:
        self.operations.append(operations)
        for operation in operations:
            assert not self.over, "an operation after the end"
            match operation:
                case Create(trial_id=trial_id):
                    assert trial_id == len(self.trained) + 1
                    self.trained[trial_id] = 0
                    self.training.add(trial_id)
                case Continue(trial_id=trial_id, until=until):
                    assert until > self.trained[trial_id]
                    assert trial_id not in self.ended | self.stopping
                    self.until[trial_id] = until
                    self.paused.discard(trial_id)
                    self.training.add(trial_id)
                case Stop(trial_id=trial_id):
                    assert trial_id in self.training | self.paused
                    if trial_id in self.training:  # it holds its slots until it has ended
                        self.leaving.add(trial_id)
                    self.training.discard(trial_id)
                    self.paused.discard(trial_id)
                    self.stopping.add(trial_id)
                case Shutdown():
                    self.over += 1
        assert len(self.training | self.leaving) <= self.concurrent
        assert 0 <= self.searcher.progress() <= 1

    def step(self, data: st.DataObject) -> bool:
        """Let a random event happen to a trial; return whether a trial was open."""
        open_ids = sorted(self.training | self.stopping)
        if not open_ids:
            return False
        trial_id = data.draw(st.sampled_from(open_ids))
        if trial_id in self.stopping:
            self.end(trial_id, "done")
            return True
        outcome = data.draw(ENDS)
        if outcome != "report":
            self.end(trial_id, outcome)
            return True
        due = min(self.until.get(trial_id, self.length), self.length)
        remaining = due - self.trained[trial_id]
        self.trained[trial_id] += data.draw(st.integers(1, remaining)) if remaining > 0 else 0
        length = self.trained[trial_id]
        if length >= due and length < self.length:
            self.training.discard(trial_id)
            self.paused.add(trial_id)
        self.send_event("validated", trial_id, data.draw(METRICS), length)
        if length >= self.length and trial_id not in self.ended:
            self.end(trial_id, "done")
        return True

    def end(self, trial_id: int, outcome: str) -> None:
        for group in (self.training, self.paused, self.stopping, self.leaving):
            group.discard(trial_id)
        self.ended.add(trial_id)
        self.send_event("exited", trial_id, outcome)


def apply_event(searcher: Searcher, event: Event) -> list[Operation]:
    if event[0] == "validated":
        return searcher.validation_completed(*event[1:])
    if event[2] == "done":
        return searcher.trial_exited(event[1])
    return searcher.trial_exited_early(event[1], event[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@settings(max_examples=30, deadline=None, phases=FIND)
@given(concurrent=st.integers(1, 6), data=st.data())
def test_random_events_keep_limits_and_replay(
    name: str, concurrent: int, data: st.DataObject
) -> None:
    block = {**BLOCKS[name], "metric": "loss", "max_concurrent_trials": concurrent}
    platform = Platform(make_searcher(block, SPACE, 5), concurrent, 27)
    for _ in range(1000):
        if not platform.step(data):
            break
    assert platform.over == 1, "the search does not end"
    assert platform.ended == set(platform.trained)
    assert platform.searcher.progress() == 1.0
    invalid = sum(event[2] == "invalid_hp" for event in platform.events if event[0] == "exited")
    assert 12 <= len(platform.trained) <= 12 + min(invalid, 12) + 3  # brackets have at least 1
    again = make_searcher(block, SPACE, 5)
    replayed = [
        again.initial_operations(),
        *(apply_event(again, event) for event in platform.events),
    ]
    assert replayed == platform.operations
    assert all(not apply_event(again, event) for event in platform.events), "a duplicate event"


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "random"])
@settings(max_examples=30, deadline=None, phases=FIND)
@given(
    concurrent=st.integers(1, 6),
    failing=st.sets(st.integers(1, 12), max_size=8),
    seed=st.integers(0, 99),
)
def test_failed_trials_do_not_block_rungs(
    name: str, concurrent: int, failing: set[int], seed: int
) -> None:
    block = {**BLOCKS[name], "metric": "loss", "max_concurrent_trials": concurrent}
    platform = Platform(make_searcher(block, SPACE, seed), concurrent, 27)
    while platform.training or platform.stopping:
        trial_id = min(platform.stopping or platform.training)
        if trial_id in failing or trial_id in platform.stopping:
            outcome = "done" if trial_id in platform.stopping else "errored"
            platform.end(trial_id, outcome)
            continue
        platform.trained[trial_id] += 1
        length = platform.trained[trial_id]
        if length == platform.until.get(trial_id) and length < 27:
            platform.training.discard(trial_id)
            platform.paused.add(trial_id)
        platform.send_event("validated", trial_id, float(trial_id), length)
    assert platform.over == 1
    assert max(platform.trained.values()) == 27, "no trial reached the top"
