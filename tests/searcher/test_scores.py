"""Values of all rungs on one scale."""

import math
from random import Random
from statistics import NormalDist

import numpy as np
import pytest

from zerolab.searcher.tpe.scores import on_one_scale


def values_of(count: int, seed: int = 0) -> dict[int, float]:
    rng = Random(seed)
    return {trial_id: rng.gauss(0, 1) for trial_id in range(count)}


def as_dict(scored: tuple[np.ndarray, np.ndarray]) -> dict[int, float]:
    return dict(zip(scored[0].tolist(), scored[1].tolist(), strict=True))


def test_a_few_have_the_deviates_of_their_ranks() -> None:
    ((ids, scores),) = on_one_scale([{5: 3.0, 7: -8.0, 6: 2.0, 9: math.inf}])
    assert ids.tolist() == [7, 6, 5, 9]
    normal = NormalDist()
    assert scores == pytest.approx(
        [normal.inv_cdf(share) for share in (1 / 8, 3 / 8, 5 / 8, 7 / 8)]
    )


def test_the_median_and_the_best_tenth_of_more_lie_where_those_of_a_normal_distribution_do() -> (
    None
):
    ((_, scores),) = on_one_scale([{i: value * 1000 for i, value in values_of(501).items()}])
    assert np.quantile(scores, (0.1, 0.5)) == pytest.approx([-1.2816, 0.0], abs=0.02)


@pytest.mark.parametrize(("stretch", "shift"), [(1e-6, 0.0), (1.0, 1e3), (250.0, -70.0)])
def test_how_a_metric_is_measured_at_a_length_makes_no_difference(
    stretch: float, shift: float
) -> None:
    low, high = values_of(60), values_of(20, seed=1)
    other = {i: value * stretch + shift for i, value in high.items()}
    expected, found = on_one_scale([low, high]), on_one_scale([low, other])
    for one, two in zip(expected, found, strict=True):
        assert one[0].tolist() == two[0].tolist()
        assert one[1] == pytest.approx(two[1], abs=1e-6)


def test_who_was_promoted_has_scores_as_good_as_that_says() -> None:
    low = values_of(90)
    best = sorted(low, key=low.__getitem__)[:30]
    high = {i: Random(i).gauss(0, 1) for i in best}
    below, above = map(as_dict, on_one_scale([low, high]))
    was = [below[i] for i in best]
    assert np.median(list(above.values())) == pytest.approx(np.median(was), abs=1e-9)
    assert max(above.values()) <= max(was)


def test_rungs_that_say_the_same_give_the_same_scores() -> None:
    low = values_of(60)
    high = {i: 5 * low[i] + 2 for i in sorted(low, key=low.__getitem__)[:20]}
    below, above = map(as_dict, on_one_scale([low, high]))
    assert [above[i] for i in high] == pytest.approx([below[i] for i in high])


def test_what_diverged_is_last_and_an_outlier_weighs_no_more_than_that() -> None:
    values = values_of(20) | {20: 1e30, 21: math.inf, 22: math.inf}
    ((ids, scores),) = on_one_scale([values])
    assert ids[-3:].tolist() == [20, 21, 22]
    assert scores[-2] == scores[-1]
    assert (np.diff(scores) >= 0).all()
    assert scores.max() < 3
    assert on_one_scale([values_of(20) | {20: -1e30}])[0][1].min() > -4


def test_who_fails_on_the_way_counts_as_the_worst_of_the_rung_below() -> None:
    low = values_of(9)
    scored = on_one_scale([low, {0: 0.1, 1: 0.2, 99: math.inf}])
    assert as_dict(scored[1])[99] == pytest.approx(max(as_dict(scored[0]).values()))


def test_who_reports_only_where_it_is_judged_counts_as_any_other() -> None:
    """Scripts may report only at the lengths that they are told; some begin at a higher one."""
    low, straight = values_of(60), values_of(9, seed=1)
    below, above = map(
        as_dict, on_one_scale([low, {100 + i: value for i, value in straight.items()}])
    )
    assert np.quantile(list(above.values()), (0.1, 0.5)) == pytest.approx(
        np.quantile(list(below.values()), (0.1, 0.5)), abs=0.3
    )
    best = sorted(low, key=low.__getitem__)[:6]
    high = {i: low[i] for i in best} | {100: 5.0, 101: -5.0, 102: math.inf}
    scores = as_dict(on_one_scale([low, high])[1])
    assert scores[101] < min(scores[i] for i in best)
    assert max(scores[i] for i in best) + 1 < scores[100] < scores[102]
    assert scores[102] == pytest.approx(max(below.values()))


@pytest.mark.parametrize("finite", [1, 2, 4, 5])
def test_of_a_rung_where_most_failed_the_others_are_better_than_they(finite: int) -> None:
    low = values_of(30)
    high = {i: low[i] if i < finite else math.inf for i in range(10)}
    below, above = map(as_dict, on_one_scale([low, high]))
    came = sorted(below[i] for i in high)
    alone, failed = [above[i] for i in range(finite)], above[9]
    if finite < 5:  # the order alone counts
        assert sorted(alone) == pytest.approx(came[:finite])
        assert failed == pytest.approx(np.mean(came[finite:]))
    else:
        assert failed == pytest.approx(came[-1])
    assert max(alone) < failed
    alike = dict.fromkeys(low, 0.5)
    above = as_dict(on_one_scale([alike, high])[1])
    assert max(above[i] for i in range(finite)) <= above[9]


def test_equal_values_have_equal_scores() -> None:
    ((_, scores),) = on_one_scale([{i: float(i // 4) for i in range(16)}])
    assert len(set(scores.tolist())) == 4
    ((_, scores),) = on_one_scale([dict.fromkeys(range(9), 0.25)])
    assert set(scores.tolist()) == {0.0}


@pytest.mark.parametrize("unit", [5e-324, 1e-300, 1e300, 1.7e308])
def test_values_as_small_or_large_as_there_are_have_scores(unit: float) -> None:
    low = {i: unit * (-1 if i % 3 else 1) * ((i % 4) / 3) for i in range(12)}
    for values in (low, low | {12: 1.7e308, 13: -1.7e308, 14: math.inf}):
        for ids, scores in on_one_scale([values, dict(list(values.items())[4:])]):
            assert (np.diff(scores) >= 0).all()
            assert np.abs(scores).max() < 6
            assert len(ids) == len(scores)


@pytest.mark.parametrize("alike", [20, 15])
def test_who_was_alike_below_is_told_apart_above(alike: int) -> None:
    """After one epoch nothing is learned yet: all have the accuracy of guesses."""
    low = {i: 0.9 if i < alike else 1.0 + i for i in range(20)}
    high = values_of(20)
    _, (ids, scores) = on_one_scale([low, high])
    assert ids.tolist() == sorted(high, key=high.__getitem__)
    assert (np.diff(scores) > 0).sum() >= 18  # all but what is cut off at the end
    assert np.quantile(scores, 0.5) - np.quantile(scores, 0.1) > 1


def test_a_rung_without_values_has_no_scores() -> None:
    scored = on_one_scale([{}, {}, {1: 0.5, 2: 0.25}])
    assert [len(ids) for ids, _ in scored] == [0, 0, 2]
