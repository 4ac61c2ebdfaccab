"""Rules of the ``tpe_asha`` ladder; ``test_proposals.py`` tests its proposals."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.searching.clock import Cluster
from benchmarks.searching.suite import OBJECTIVES
from zerolab.errors import ConfigError
from zerolab.extensions.searcher_tpe.ladder import Ladder, forecast, make_levels
from zerolab.extensions.searcher_tpe.proposals import Proposer
from zerolab.extensions.searcher_tpe.rung_correlation import RungCorrelation
from zerolab.extensions.searcher_tpe.search import TpeAshaSearcher
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
    "net": {"width": {"type": "int", "minval": 1, "maxval": 9}, "act": "relu"},
    "kind": {"type": "categorical", "vals": ["sgd", "adam"]},
    "momentum": {"type": "double", "minval": 0, "maxval": 0.99, "when": {"kind": "sgd"}},
}


def searcher(
    trials: int = 60, concurrent: int = 4, seed: int = 0, length: int = 27, **block: Any
) -> Searcher:
    config = {
        "name": "tpe_asha",
        "metric": "loss",
        "max_length": length,
        "max_trials": trials,
        "max_concurrent_trials": concurrent,
        **block,
    }
    return make_searcher(config, SPACE, seed)


def loss(hparams: Mapping[str, Any]) -> float:
    """Best at a learning rate of 0.01, a width of 7 and SGD with a momentum of 0.9."""
    off = abs(math.log10(hparams["lr"]) + 2) + abs(hparams["net"]["width"] - 7) / 4
    return off + (abs(hparams["momentum"] - 0.9) if hparams["kind"] == "sgd" else 0.5)


class Run:
    """Cluster model that performs operations immediately, one trial after the other."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.hparams: dict[int, dict[str, Any]] = {}
        self.until: dict[int, int] = {}
        self.training: list[int] = []
        self.ended: list[int] = []
        self.over = False
        self.log: list[Operation] = []
        self.take(searcher.initial_operations())

    def take(self, operations: list[Operation]) -> None:
        waiting = deque(operations)
        while waiting:
            operation = waiting.popleft()
            assert not self.over
            self.log.append(operation)
            match operation:
                case Create(trial_id, hparams, _):
                    assert trial_id == len(self.hparams) + 1
                    self.hparams[trial_id] = hparams
                case Continue(trial_id, until):
                    assert trial_id not in self.training
                    assert trial_id not in self.ended
                    assert until > self.until.get(trial_id, 0)
                    self.until[trial_id] = until
                    self.training.append(trial_id)
                case Stop(trial_id):
                    if trial_id in self.training:
                        self.training.remove(trial_id)
                    assert trial_id not in self.ended
                    self.ended.append(trial_id)
                    waiting.extend(self.searcher.trial_exited(trial_id))
                case Shutdown():
                    self.over = True

    def report(self, trial_id: int, value: float) -> None:
        self.training.remove(trial_id)
        self.take(self.searcher.validation_completed(trial_id, value, self.until[trial_id]))

    def fail(self, trial_id: int, reason: ExitReason) -> None:
        self.training.remove(trial_id)
        self.ended.append(trial_id)
        self.take(self.searcher.trial_exited_early(trial_id, reason))

    def finish(self) -> None:
        while self.training:
            trial_id = self.training[0]
            self.report(trial_id, loss(self.hparams[trial_id]))


@pytest.mark.parametrize(
    ("length", "levels"),
    [(27, [1, 3, 9, 27]), (100, [3, 11, 33, 100]), (10, [1, 3, 10]), (2, [1, 2]), (1, [1])],
)
def test_levels_are_unique_powers_of_a_third(length: int, levels: list[int]) -> None:
    assert make_levels(length) == levels


@pytest.mark.parametrize(
    ("length", "counts"), [(27, [24, 8, 3]), (10, [24, 8]), (2, [24]), (1, [24])]
)
def test_entry_rungs_of_35_trials(length: int, counts: list[int]) -> None:
    ladder = Ladder(length)
    entries = [ladder.assign_entry_rung() for _ in range(sum(counts) + 4)]
    probes = (9, 10, 13, 32)
    entries = [rung for number, rung in enumerate(entries, start=1) if number not in probes]
    entries = entries[: sum(counts)]
    assert [entries.count(rung) for rung in range(len(counts))] == counts


def test_probes_train_to_full_length() -> None:
    ladder = Ladder(27)
    probes = [number for number in range(1, 250) if ladder.assign_entry_rung() == 3]
    assert probes == [9, 10, 13, 32, 64, 128]


def test_new_trial_trains_to_entry_rung() -> None:
    operations = searcher(concurrent=10).initial_operations()
    lengths = [operation.until for operation in operations if isinstance(operation, Continue)]
    assert lengths == [1, 3, 1, 1, 1, 9, 1, 3, 27, 27]
    assert len(operations) == 20


def judge(ladder: Ladder, trial_id: int, *values: float) -> None:
    """Report a trial's values at every rung up to the last value."""
    for rung, value in enumerate(values[:-1]):
        ladder.record_intermediate(ladder.levels[rung], value, trial_id)
    ladder.insert(len(values) - 1, values[-1], trial_id)


def test_misleading_rung_gets_no_trials_and_no_promotions() -> None:
    ladder = Ladder(27)
    for trial_id in range(1, 9):
        judge(ladder, trial_id, -trial_id, trial_id, trial_id, trial_id)
    for trial_id in range(9, 15):
        judge(ladder, trial_id, trial_id)
    assert ladder.promote({}) is None
    entries = [ladder.assign_entry_rung() for _ in range(45)]
    assert 0 not in entries
    assert entries.count(1) > entries.count(2) > entries.count(3) > 0


def test_all_rungs_misleading_trains_to_full_length() -> None:
    ladder = Ladder(27)
    for trial_id in range(1, 9):
        judge(ladder, trial_id, -trial_id, -trial_id, -trial_id, trial_id)
    assert {ladder.assign_entry_rung() for _ in range(20)} == {3}
    assert ladder.best_trials(8) == (list(range(1, 9)), 8)


def test_misleading_rung_is_not_learned_from() -> None:
    ladder = Ladder(27)
    for trial_id in range(1, 8):
        judge(ladder, trial_id, -trial_id, -trial_id, -trial_id, trial_id)
    for trial_id in range(8, 30):
        judge(ladder, trial_id, -(trial_id % 8))
    assert ladder.best_trials(8) is None  # seven at the top are too few


def test_rung_above_random_ones_must_earn_trust() -> None:
    ladder = Ladder(27)
    second, third = [7, 0, 5, 3, 2, 4, 1, 6], [5, 4, 3, 2, 0, 7, 6, 1]
    for first, values in enumerate(zip(second, third, strict=True)):
        judge(ladder, first + 1, first, *values)
    assert {ladder.assign_entry_rung() for _ in range(9)} == {3}
    for trial_id in range(9, 15):
        judge(ladder, trial_id, 8, 8, trial_id, trial_id)
    assert 2 in {ladder.assign_entry_rung() for _ in range(9)}


@pytest.mark.parametrize(
    ("longer", "share"),
    [
        # pairs (1, 2) (1, 3) (1, 4) (2, 3) (2, 4) (3, 4) lie 1, 2, 3, 1, 2, 1 quarters apart
        ((1, 2, 3, 4), (10 / 6 + 0.425) / (10 / 6 + 0.5)),
        ((2, 3, 1, 4), (7 / 6 + 0.425) / (10 / 6 + 0.5)),
        ((2, 4, 1, 3), (5 / 6 + 0.425) / (10 / 6 + 0.5)),
        ((3, 1, 4, 2), (5 / 6 + 0.425) / (10 / 6 + 0.5)),
        ((4, 3, 2, 1), 0.425 / (10 / 6 + 0.5)),
    ],
)
def test_trust_follows_share_of_correct_pairs(longer: tuple[int, ...], share: float) -> None:
    agreement = RungCorrelation(2)
    assert agreement.trust() == [1.0, 1.0]
    for trial_id, value in enumerate(longer, start=1):
        agreement.record(0, trial_id, trial_id)
        agreement.record(1, trial_id, value)
    trust = min(max((share - 0.5) / 0.2, 0.0), 1.0)
    assert agreement.trust() == pytest.approx([trust, 1.0])


def test_trust_handles_overflowing_differences() -> None:
    agreement = RungCorrelation(2)
    for trial_id, value in enumerate((-1.7e308, 0.0, 1.7e308, math.inf)):
        agreement.record(0, trial_id, value)
        agreement.record(1, trial_id, value)
    assert agreement.trust() == [1.0, 1.0]


def test_no_trust_below_untrusted_rung() -> None:
    agreement = RungCorrelation(3)
    for trial_id, longer in enumerate([(1, 2), (3, 3), (4, 1), (2, 4)], start=1):
        for rung, value in enumerate((trial_id, *longer)):
            agreement.record(rung, trial_id, value)
    # The first rung orders 7 of 10 ranks' distance as the second does, and 7 as the third does: it
    # alone would be trusted fully, with (7/6 + 0.425) / (10/6 + 0.5) = 0.735, and from there 0.708.
    # The second orders 3 of 10 as the third does, 0.400, and would promote no trial.
    assert agreement.trust() == [0.0, 0.0, 1.0]


def test_confirmed_order_keeps_entry_rungs() -> None:
    ladder, untold = Ladder(27), Ladder(27)
    for trial_id in range(1, 9):
        judge(ladder, trial_id, trial_id, trial_id, trial_id, trial_id)
    assert [ladder.assign_entry_rung() for _ in range(40)] == [
        untold.assign_entry_rung() for _ in range(40)
    ]


def test_forecast_counts_trials_per_length() -> None:
    # 56 trials enter at 0, 1 and 2 as 38, 13 and 5, and 4 are probes. A third of five at a rung
    # are promoted, and three quarters of the others.
    assert forecast(27, 60) == {1: 12, 3: 12, 9: 10, 27: 26}
    assert forecast(1, 5) == {1: 5}


@pytest.mark.parametrize("trials", [10, 30, 60])
def test_forecast_matches_simulated_searches(trials: int) -> None:
    trained = []
    for name in ("branin", "mixed valley", "digits mlp", "ackley5", "honest", "cliff"):
        cluster = Cluster(OBJECTIVES[name], workers=4, seed=trials)
        space = OBJECTIVES[name].space
        cluster.run(
            TpeAshaSearcher(space, 27, trials, 4, seed=trials, smaller_is_better=True), math.inf
        )
        trained.append(sum(trial.epoch for trial in cluster.trials.values()))
    estimate = sum(length * count for length, count in forecast(27, trials).items())
    assert 0.67 * estimate < median(trained) < 1.5 * estimate


@pytest.mark.parametrize("trials", [1, 2, 3, 4])
def test_forecast_of_few_trials_is_exact(trials: int) -> None:
    run = Run(searcher(trials, concurrent=1))
    run.finish()
    assert forecast(27, trials) == dict(Counter(run.until.values()))
    assert 27 in run.until.values()


def test_promotes_best_third_from_highest_rung_first() -> None:
    ladder = Ladder(27)
    for trial_id, value in enumerate([0.5, 0.3, 0.4, 0.2, 0.6, 0.1], start=1):
        ladder.insert(0, value, trial_id)
    for trial_id, value in enumerate([0.9, 0.8, 0.7], start=7):
        ladder.insert(2, value, trial_id)
    promoted = [ladder.promote({}) for _ in range(4)]
    assert promoted == [(9, 3), (6, 1), (4, 1), None]


def test_quota_below_top_rounds_up() -> None:
    ladder = Ladder(27)
    assert [ladder.promotion_quota(2, judged) for judged in range(8)] == [0, 1, 1, 1, 2, 2, 2, 3]
    assert [ladder.promotion_quota(1, judged) for judged in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    ladder.insert(2, 0.5, 1)
    assert ladder.promote({}) == (1, 3)
    ladder.insert(2, 0.6, 2)
    assert ladder.promote({}) is None
    ladder.insert(2, 0.1, 3)
    assert ladder.promote({}) == (3, 3)


def test_promotion_ties_favour_older_trial() -> None:
    ladder = Ladder(27)
    for trial_id in (5, 3, 4):
        ladder.insert(0, 0.5, trial_id)
    assert ladder.promote({}) == (3, 1)


def test_diverged_or_ended_trial_is_never_promoted() -> None:
    ladder = Ladder(27)
    for trial_id, value in [(1, math.inf), (2, math.inf), (3, math.inf)]:
        ladder.insert(0, value, trial_id)
    assert ladder.promote({}) is None
    for trial_id, value in [(4, 0.1), (5, 0.2), (6, 0.3)]:
        ladder.insert(0, value, trial_id)
    assert ladder.promote({4: "errored"}) == (5, 1)


def test_promotion_precedes_new_trials() -> None:
    run = Run(searcher(concurrent=3))
    assert [run.until[i] for i in (1, 2, 3)] == [1, 3, 1]
    run.report(1, 0.5)
    run.report(3, 0.4)
    assert run.training == [2, 4, 5]
    run.report(2, 0.6)
    assert run.training == [4, 5, 6]  # a new trial: no trial is in the best third of a rung
    assert run.until[6] == 9
    run.report(5, 0.6)
    assert run.training == [4, 6, 3]
    assert run.log[-1] == Continue(3, 3)


def test_at_most_200_initial_trials_use_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    propose = Proposer.propose
    monkeypatch.setattr(
        Proposer, "propose", lambda self, *arguments: calls.append(1) or propose(self, *arguments)
    )
    operations = searcher(trials=500, concurrent=300).initial_operations()
    assert sum(isinstance(operation, Create) for operation in operations) == 300
    assert len(calls) == 200


def test_report_below_rung_has_no_effect() -> None:
    tpe = searcher(concurrent=15)
    first = tpe.initial_operations()
    trial_id = next(o.trial_id for o in first if isinstance(o, Continue) and o.until == 9)
    assert tpe.validation_completed(trial_id, 0.1, 3) == []
    assert tpe.validation_completed(trial_id, 0.1, 8.9) == []
    assert tpe.validation_completed(trial_id, 0.1, 9) != []


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_diverged_trial_is_stopped_immediately(metric: float) -> None:
    tpe = searcher(concurrent=15)
    first = tpe.initial_operations()
    trial_id = next(o.trial_id for o in first if isinstance(o, Continue) and o.until == 9)
    assert tpe.validation_completed(trial_id, metric, 1) == [Stop(trial_id)]
    assert isinstance(tpe.trial_exited(trial_id)[0], Create)


def test_trial_at_full_length_is_stopped() -> None:
    tpe = searcher(trials=1, concurrent=1, length=1)
    tpe.initial_operations()
    assert tpe.validation_completed(1, 0.5, 1) == [Stop(1)]
    assert tpe.trial_exited(1) == [Shutdown()]


def test_larger_metric_is_better_if_configured() -> None:
    run = Run(searcher(trials=3, concurrent=3, length=2, smaller_is_better=False))
    for trial_id, value in ((2, 0.9), (1, 0.1), (3, 0.5)):
        run.report(trial_id, value)
    assert run.training == [2]


def test_invalid_hp_trial_is_replaced() -> None:
    run = Run(searcher(trials=3, concurrent=1, length=27))
    run.fail(1, ExitReason.INVALID_HP)
    assert run.training == [2]
    assert run.until[2] == run.until[1]  # same entry rung as the replaced trial
    run.finish()
    assert len(run.hparams) == 4
    assert run.over


def test_invalid_hp_replacements_are_limited() -> None:
    run = Run(searcher(trials=3, concurrent=1))
    while run.training:
        run.fail(run.training[0], ExitReason.INVALID_HP)
    assert len(run.hparams) == 6
    assert run.over


@pytest.mark.parametrize("reason", [ExitReason.ERRORED, ExitReason.USER_CANCELED])
def test_failed_trial_ranks_last(reason: ExitReason) -> None:
    run = Run(searcher(trials=4, concurrent=4, length=2))
    run.fail(1, reason)
    for trial_id, value in ((2, 0.4), (3, 0.5), (4, 0.6)):
        run.report(trial_id, value)
    assert run.training == [2, 3]  # two of four: the failed one counts


@pytest.mark.parametrize("canceled", [False, True])
def test_paused_trial_is_promoted_unless_canceled(
    canceled: bool,
) -> None:
    run = Run(searcher(trials=4, concurrent=4, length=2))
    run.report(2, 0.1)
    run.report(1, 0.2)
    assert run.training == [3, 4, 2]
    if canceled:
        run.take(run.searcher.trial_exited_early(1, ExitReason.USER_CANCELED))
    run.report(3, 0.3)
    run.report(4, 0.4)
    assert (Continue(1, 2) in run.log) is not canceled


def test_trial_ending_early_is_judged_by_last_report() -> None:
    tpe = searcher(trials=3, concurrent=3, length=27)
    tpe.initial_operations()
    tpe.validation_completed(2, 0.25, 1)
    tpe.trial_exited(2)
    view = tpe._ladder.rungs  # type: ignore[attr-defined]
    assert (0.25, 2) in view[1]


def test_search_end_stops_paused_trials() -> None:
    run = Run(searcher(trials=40, concurrent=4))
    run.finish()
    assert run.over
    assert sorted(run.ended) == list(range(1, 41))
    assert run.searcher.progress() == 1.0
    lengths = [run.until[i] for i in run.ended]
    assert lengths.count(27) >= 1


def test_later_trials_are_better() -> None:
    first, last = [], []
    for seed in range(5):
        run = Run(searcher(trials=150, concurrent=4, seed=seed))
        run.finish()
        losses = [loss(hparams) for hparams in run.hparams.values()]
        first += losses[:30]
        last += losses[-50:]
    assert median(last) < 0.7 * median(first)  # random search: 1, give or take a tenth


def step(tpe: Searcher, event: tuple[int, str, float], length: float) -> list[Operation]:
    trial_id, kind, value = event
    if kind == "validated":
        return tpe.validation_completed(trial_id, value, length)
    if kind == "exited":
        return tpe.trial_exited(trial_id)
    return tpe.trial_exited_early(trial_id, kind)


KINDS = ("validated", "validated", "validated", "early", "errored", "invalid_hp", "user_canceled")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.integers(1, 5), st.sampled_from([1, 2, 10, 27]), st.data())
def test_random_events_keep_limits_and_replay(
    trials: int, concurrent: int, length: int, data: st.DataObject
) -> None:
    tpe = searcher(trials, concurrent, 3, length)
    events: list[tuple[tuple[int, str, float], float]] = []
    log = list(tpe.initial_operations())
    until: dict[int, int] = {}
    training: set[int] = set()
    ended: set[int] = set()
    fresh = log
    while True:
        stopped = []
        for operation in fresh:
            match operation:
                case Continue(trial_id, to):
                    assert trial_id not in training | ended
                    until[trial_id] = to
                    training.add(trial_id)
                case Stop(trial_id):
                    stopped.append(trial_id)
        assert len(training) <= concurrent
        if stopped:
            # stopped trials end after the next event, as on a cluster
            stop_event: tuple[int, str, float] = (stopped[0], "exited", 0.0)
            fresh = list(fresh[fresh.index(Stop(stopped[0])) + 1 :])
            ended.add(stopped[0])
            training.discard(stopped[0])
            events.append((stop_event, 0.0))
            more = step(tpe, stop_event, 0.0)
            log += more
            fresh = [o for o in fresh if isinstance(o, Stop)] + more
            continue
        if not training:
            break
        trial_id = data.draw(st.sampled_from(sorted(training)))
        kind = data.draw(st.sampled_from(KINDS))
        value = data.draw(st.sampled_from([0.1, 0.2, 0.3, math.nan]))
        at = float(until[trial_id])
        if kind == "early":
            kind, at, value = "validated", at / 2, 0.1
        else:
            training.discard(trial_id)
            if kind != "validated":
                ended.add(trial_id)
        events.append(((trial_id, kind, value), at))
        fresh = step(tpe, events[-1][0], at)
        log += fresh
        assert 0.0 <= tpe.progress() <= 1.0
    assert sum(isinstance(operation, Shutdown) for operation in log) == 1
    assert log[-1] == Shutdown()
    assert tpe.progress() == 1.0
    count = sum(isinstance(operation, Create) for operation in log)
    assert trials <= count <= 2 * trials

    again = searcher(trials, concurrent, 3, length)
    replayed = list(again.initial_operations())
    for event, at in events:
        replayed += step(again, event, at)
        assert step(again, event, at) == []  # a duplicate changes nothing
    assert replayed == log


def test_unknown_trial_events_are_ignored() -> None:
    tpe = searcher(concurrent=2)
    tpe.initial_operations()
    assert tpe.trial_created(1) == []
    assert tpe.validation_completed(99, 0.5, 27) == []
    assert tpe.trial_exited(99) == []
    assert tpe.trial_exited_early(99, "errored") == []
    with pytest.raises(ValueError, match="bored"):
        tpe.trial_exited_early(1, "bored")


def test_trials_depend_on_seed() -> None:
    runs = [Run(searcher(seed=seed)) for seed in (1, 1, 2)]
    for run in runs:
        run.finish()
    assert runs[0].log == runs[1].log
    assert runs[0].log != runs[2].log


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"max_length": None}, "max_length: is required by the tpe_asha searcher"),
        ({"max_concurrent_trials": 0}, "max_concurrent_trials: must be at least 1"),
        ({"max_trials": 0}, "max_trials: must be greater than 0"),
    ],
)
def test_invalid_block_is_rejected(block: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        searcher(**block)
