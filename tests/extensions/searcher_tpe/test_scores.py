"""Normalization of the metrics of all rungs to one scale."""

import math
from random import Random
from statistics import NormalDist

import numpy as np
import pytest

from zerolab.extensions.searcher_tpe.scores import normalize_rungs


def values_of(count: int, seed: int = 0) -> dict[int, float]:
    rng = Random(seed)
    return {trial_id: rng.gauss(0, 1) for trial_id in range(count)}


def as_dict(scored: tuple[np.ndarray, np.ndarray]) -> dict[int, float]:
    return dict(zip(scored[0].tolist(), scored[1].tolist(), strict=True))


def test_few_values_get_normal_deviates() -> None:
    ((ids, scores),) = normalize_rungs([{5: 3.0, 7: -8.0, 6: 2.0, 9: math.inf}])
    assert ids.tolist() == [7, 6, 5, 9]
    normal = NormalDist()
    assert scores == pytest.approx(
        [normal.inv_cdf(share) for share in (1 / 8, 3 / 8, 5 / 8, 7 / 8)]
    )


def test_quantiles_match_normal_distribution() -> None:
    ((_, scores),) = normalize_rungs([{i: value * 1000 for i, value in values_of(501).items()}])
    assert np.quantile(scores, (0.1, 0.5)) == pytest.approx([-1.2816, 0.0], abs=0.02)


@pytest.mark.parametrize(("stretch", "shift"), [(1e-6, 0.0), (1.0, 1e3), (250.0, -70.0)])
def test_scores_are_invariant_to_affine_metrics(stretch: float, shift: float) -> None:
    low, high = values_of(60), values_of(20, seed=1)
    other = {i: value * stretch + shift for i, value in high.items()}
    expected, scored = normalize_rungs([low, high]), normalize_rungs([low, other])
    for a, b in zip(expected, scored, strict=True):
        assert a[0].tolist() == b[0].tolist()
        assert a[1] == pytest.approx(b[1], abs=1e-6)


def test_promoted_trials_keep_scores_of_rung_below() -> None:
    low = values_of(90)
    best = sorted(low, key=low.__getitem__)[:30]
    high = {i: Random(i).gauss(0, 1) for i in best}
    below, above = map(as_dict, normalize_rungs([low, high]))
    was = [below[i] for i in best]
    assert np.median(list(above.values())) == pytest.approx(np.median(was), abs=1e-9)
    assert max(above.values()) <= max(was)


def test_equal_rankings_give_equal_scores() -> None:
    low = values_of(60)
    high = {i: 5 * low[i] + 2 for i in sorted(low, key=low.__getitem__)[:20]}
    below, above = map(as_dict, normalize_rungs([low, high]))
    assert [above[i] for i in high] == pytest.approx([below[i] for i in high])


def test_outliers_are_clipped_and_diverged_rank_last() -> None:
    values = values_of(20) | {20: 1e30, 21: math.inf, 22: math.inf}
    ((ids, scores),) = normalize_rungs([values])
    assert ids[-3:].tolist() == [20, 21, 22]
    assert scores[-2] == scores[-1]
    assert (np.diff(scores) >= 0).all()
    assert scores.max() < 3
    assert normalize_rungs([values_of(20) | {20: -1e30}])[0][1].min() > -4


def test_failure_on_the_way_scores_as_worst_below() -> None:
    low = values_of(9)
    scored = normalize_rungs([low, {0: 0.1, 1: 0.2, 99: math.inf}])
    assert as_dict(scored[1])[99] == pytest.approx(max(as_dict(scored[0]).values()))


def test_trial_without_lower_reports_scores_as_average() -> None:
    """Scripts may report only at the requested lengths; some trials start at a higher rung."""
    low, straight = values_of(60), values_of(9, seed=1)
    below, above = map(
        as_dict, normalize_rungs([low, {100 + i: value for i, value in straight.items()}])
    )
    assert np.quantile(list(above.values()), (0.1, 0.5)) == pytest.approx(
        np.quantile(list(below.values()), (0.1, 0.5)), abs=0.3
    )
    best = sorted(low, key=low.__getitem__)[:6]
    high = {i: low[i] for i in best} | {100: 5.0, 101: -5.0, 102: math.inf}
    scores = as_dict(normalize_rungs([low, high])[1])
    assert scores[101] < min(scores[i] for i in best)
    assert max(scores[i] for i in best) + 1 < scores[100] < scores[102]
    assert scores[102] == pytest.approx(max(below.values()))


@pytest.mark.parametrize("finite", [1, 2, 4, 5])
def test_finite_values_beat_failed_ones(finite: int) -> None:
    low = values_of(30)
    high = {i: low[i] if i < finite else math.inf for i in range(10)}
    below, above = map(as_dict, normalize_rungs([low, high]))
    scores_below = sorted(below[i] for i in high)
    succeeded, failed = [above[i] for i in range(finite)], above[9]
    if finite < 5:  # the order alone counts
        assert sorted(succeeded) == pytest.approx(scores_below[:finite])
        assert failed == pytest.approx(np.mean(scores_below[finite:]))
    else:
        assert failed == pytest.approx(scores_below[-1])
    assert max(succeeded) < failed
    alike = dict.fromkeys(low, 0.5)
    above = as_dict(normalize_rungs([alike, high])[1])
    assert max(above[i] for i in range(finite)) <= above[9]


def test_equal_values_have_equal_scores() -> None:
    ((_, scores),) = normalize_rungs([{i: float(i // 4) for i in range(16)}])
    assert len(set(scores.tolist())) == 4
    ((_, scores),) = normalize_rungs([dict.fromkeys(range(9), 0.25)])
    assert set(scores.tolist()) == {0.0}


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300, 1.7e308])
def test_extreme_values_have_finite_scores(unit: float) -> None:
    low = {i: unit * (-1 if i % 3 else 1) * ((i % 4) / 3) for i in range(12)}
    for values in (low, low | {12: 1.7e308, 13: -1.7e308, 14: math.inf}):
        for ids, scores in normalize_rungs([values, dict(list(values.items())[4:])]):
            assert (np.diff(scores) >= 0).all()
            assert np.abs(scores).max() < 6
            assert len(ids) == len(scores)


@pytest.mark.parametrize("alike", [20, 15])
def test_ties_below_are_separated_above(alike: int) -> None:
    """After one epoch nothing is learned yet: all have the accuracy of guesses."""
    low = {i: 0.9 if i < alike else 1.0 + i for i in range(20)}
    high = values_of(20)
    _, (ids, scores) = normalize_rungs([low, high])
    assert ids.tolist() == sorted(high, key=high.__getitem__)
    assert (np.diff(scores) > 0).sum() >= 18  # all but the clipped ones
    assert np.quantile(scores, 0.5) - np.quantile(scores, 0.1) > 1


def test_empty_rung_has_no_scores() -> None:
    scored = normalize_rungs([{}, {}, {1: 0.5, 2: 0.25}])
    assert [len(ids) for ids, _ in scored] == [0, 0, 2]
