"""``optuna``: samplers of the real library as a searcher."""

import math
from typing import Any

import pytest

from zerolab.errors import ConfigError
from zerolab.searcher import (
    Create,
    Deferred,
    ExitReason,
    Operation,
    Searcher,
    Shutdown,
    Stop,
    compute_deferred,
    make_searcher,
)

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.needs_extension("optuna")

SPACE: dict[str, Any] = {
    "lr": {"type": "log", "min": 1e-4, "max": 0.1},
    "net": [{"width": {"type": "int", "minval": 1, "maxval": 9}}],
    "kind": {"type": "categorical", "vals": [[1, 2], "adam"]},
    "momentum": {"type": "double", "minval": 0.1, "maxval": 0.99, "when": {"kind": "adam"}},
    "seed": 3,
}
SAMPLERS = ("TPESampler", "CmaEsSampler", "QMCSampler", "NSGAIISampler", "RandomSampler")


def search(space: dict[str, Any] = SPACE, **block: Any) -> Searcher:
    fields = {"name": "optuna", "metric": "loss", "max_trials": 16, "max_length": 10}
    return make_searcher({**fields, "max_concurrent_trials": 3, **block}, space, 7)


def loss(hparams: dict[str, Any]) -> float:
    return abs(math.log10(hparams["lr"]) + 2) + abs(hparams["net"][0]["width"] - 5) / 10


def run(searcher: Searcher, fails: tuple[int, ...] = ()) -> list[Operation]:
    """Run all trials, the oldest first; return all operations."""
    operations: list[Operation] = [*compute_deferred(searcher.initial_operations())]
    for operation in operations:  # it grows
        if not isinstance(operation, Create):
            continue
        number = operation.trial_id
        assert searcher.validation_completed(number, loss(operation.hparams), 10) == []
        if number in fails:
            ended = searcher.trial_exited_early(number, ExitReason.ERRORED)
        else:
            ended = searcher.trial_exited(number)
        operations += compute_deferred(ended)
    return operations


def test_study_is_used_in_the_order_of_events() -> None:
    """Operations of two events are computed later, and in another order."""
    early, late = search(max_concurrent_trials=2), search(max_concurrent_trials=2)
    expected = [*compute_deferred(early.initial_operations())]
    assert compute_deferred(late.initial_operations()) == expected
    deferred: list[Operation] = []
    for number in (1, 2):
        early.validation_completed(number, number / 10, 10)
        late.validation_completed(number, number / 10, 10)
        expected += compute_deferred(early.trial_exited(number))
        deferred += late.trial_exited(number)
    assert all(isinstance(operation, Deferred) for operation in deferred)
    assert expected[2:] == compute_deferred(reversed(deferred))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_replay_proposes_equal_trials(sampler: str) -> None:
    if sampler == "CmaEsSampler":
        pytest.importorskip("cmaes")
    operations = run(search(sampler=sampler), fails=(2, 9))
    assert operations == run(search(sampler=sampler), fails=(2, 9))
    creates = [operation for operation in operations if isinstance(operation, Create)]
    assert len(creates) == 16
    assert operations[-1] == Shutdown()
    assert len({create.hparams["lr"] for create in creates}) > 10
    for create in creates:
        assert 1e-4 <= create.hparams["lr"] <= 0.1
        assert 1 <= create.hparams["net"][0]["width"] <= 9
        assert ("momentum" in create.hparams) is (create.hparams["kind"] == "adam")


def test_tpe_sampler_learns_from_the_metric() -> None:
    creates = [item for item in run(search(max_trials=40)) if isinstance(item, Create)]
    values = [loss(create.hparams) for create in creates]
    assert sum(values[-10:]) < 0.7 * sum(values[:10])
    worst = search(max_trials=40, smaller_is_better=False)
    values = [loss(item.hparams) for item in run(worst) if isinstance(item, Create)]
    assert sum(values[-10:]) > 1.1 * sum(values[:10])


def test_study_is_told_how_trials_ended() -> None:
    searcher: Any = search()
    operations = searcher.initial_operations()
    searcher.validation_completed(1, 0.5, 5)
    searcher.validation_completed(1, 0.25, 10)
    operations += searcher.trial_exited(1)
    searcher.validation_completed(2, 0.5, 5)
    operations += searcher.trial_exited_early(2, ExitReason.ERRORED)
    searcher.validation_completed(3, math.nan, 10)
    operations += searcher.trial_exited(3)
    operations += searcher.trial_exited_early(4, ExitReason.INVALID_HP)
    operations += searcher.trial_exited(5)  # without a value of the metric
    compute_deferred(operations)
    states = [(trial.state.name, trial.value) for trial in searcher._study.trials[:5]]
    assert states == [("COMPLETE", 0.25), *[("FAIL", None)] * 4]


def test_invalid_trial_is_replaced_and_duplicates_change_nothing() -> None:
    searcher = search(max_trials=3)
    compute_deferred(searcher.initial_operations())
    (replacement,) = compute_deferred(searcher.trial_exited_early(2, ExitReason.INVALID_HP))
    assert isinstance(replacement, Create)
    assert replacement.trial_id == 4
    assert searcher.trial_exited(2) == []
    assert searcher.validation_completed(2, 0.1, 10) == []
    assert searcher.trial_exited(99) == []


def test_pruner_stops_worst_trial() -> None:
    arguments = {"n_startup_trials": 2}
    searcher: Any = search(pruner="MedianPruner", pruner_args=arguments, max_concurrent_trials=4)
    compute_deferred(searcher.initial_operations())

    def report(number: int, value: float, length: int) -> list[Any]:
        return [*compute_deferred(searcher.validation_completed(number, value, length))]

    for number in (1, 2):
        for length in (5, 10):
            assert report(number, 0.1 * number, length) == []
        compute_deferred(searcher.trial_exited(number))
    assert report(3, 0.05, 5) == []
    assert report(4, 0.9, 5) == [Stop(4)]
    assert report(4, 0.9, 6) == []
    compute_deferred(searcher.trial_exited(4))
    assert searcher._study.trials[3].state.name == "PRUNED"


def problems(**block: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        search(**block)
    return caught.value.problems


def test_unknown_names_and_arguments_are_reported_together() -> None:
    arguments = {"n_startup_trial": 3, "gamma": "x", "multivariate": 1, "prior_weight": "a"}
    found = problems(sampler_args=arguments, pruner="Median", max_concurrent_trials=0)
    text = "\n".join(found)
    assert len(found) == 6
    assert (
        "n_startup_trial: unknown argument of TPESampler; did you mean 'n_startup_trials'?" in text
    )
    assert (
        "searcher.sampler_args.gamma: must be left out, since a file cannot give Callable" in text
    )
    assert "searcher.sampler_args.multivariate: must be bool or None, got 1" in text
    assert "searcher.sampler_args.prior_weight: must be float" in text
    assert "got 'Median'; did you mean 'MedianPruner'?" in text
    assert "searcher.max_concurrent_trials: must be at least 1" in text


def test_unusable_classes_name_a_replacement() -> None:
    assert problems(sampler="GridSampler")[0].endswith("got 'GridSampler'; use searcher.name: grid")
    assert problems(sampler="TPE")[0].startswith("searcher.sampler: must be one of CmaEsSampler, ")
    assert "searcher.pruner: must be one of" in problems(pruner="BasePruner")[0]
    (refused,) = problems(pruner="MedianPruner", pruner_args={"n_min_trials": 0})
    assert refused.startswith("searcher.pruner_args: must be accepted by MedianPruner, got ")


def test_missing_library_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    (problem,) = problems()
    assert "run `pip install 'zerolab[optuna]'`" in problem


def test_more_trials_continue_a_finished_search() -> None:
    from zerolab.searcher.factory import read_section

    searcher = search(max_trials=4)
    assert run(searcher)[-1] == Shutdown()
    fields = {"name": "optuna", "metric": "loss", "max_length": 10, "max_trials": 6}
    (first, second) = compute_deferred(read_section(fields).grow(searcher, ()))
    assert isinstance(first, Create)
    assert isinstance(second, Create)
    assert (first.trial_id, second.trial_id) == (5, 6)
    assert compute_deferred(searcher.trial_exited(5)) == []
    assert compute_deferred(searcher.trial_exited(6)) == [Shutdown()]
