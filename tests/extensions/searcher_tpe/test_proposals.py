"""Proposals of the density ratio and of the Gaussian process."""

import math
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from zerolab.extensions.searcher_tpe import proposals
from zerolab.extensions.searcher_tpe.ladder import Ladder
from zerolab.extensions.searcher_tpe.parzen import Mixture
from zerolab.extensions.searcher_tpe.proposals import Proposer
from zerolab.schema.space import Point, Space

REAL = {"x": {"type": "double", "minval": 0, "maxval": 1}}
MIXED = REAL | {
    "kind": {"type": "categorical", "vals": ["a", "b", "c"]},
    "n": {"type": "int", "minval": 1, "maxval": 9},
    "y": {"type": "log", "minval": -4, "maxval": 0, "when": {"kind": "b"}},
}


class Counting(Space):
    """Space that counts the points drawn from the whole space."""

    drawn = 0

    def point(self, rng: Random) -> Point:
        self.drawn += 1
        return super().point(rng)


@pytest.fixture
def densities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose always by the density ratio."""
    monkeypatch.setattr(proposals, "_BY_DENSITIES", 1.0)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose always by the Gaussian process."""
    monkeypatch.setattr(proposals, "_BY_DENSITIES", 0.0)
    monkeypatch.setattr(proposals, "_UNIFORM", 0.0)


def at_full_length(points: Sequence[float]) -> tuple[Ladder, dict[int, Point]]:
    """Return a ladder of one rung with judged trials, best first."""
    ladder = Ladder(1)
    for trial_id in range(len(points)):
        ladder.insert(0, trial_id, trial_id)
    return ladder, {trial_id: (value,) for trial_id, value in enumerate(points)}


def blas_threads() -> list[int]:
    """Return the thread counts of numpy's BLAS only; other tests may have loaded another."""
    return [pool["num_threads"] for pool in proposals._BLAS.info() if pool["user_api"] == "blas"]


def proposed(space: Space, points: Sequence[float], count: int) -> list[float]:
    ladder, points_by_id = at_full_length(points)
    drawn = [
        Proposer(space).propose(ladder, points_by_id, [], Random(seed)) for seed in range(count)
    ]
    return [float(point[0] or 0.0) for point in drawn]


def test_one_in_twenty_trials_is_random() -> None:
    space = Counting(REAL)
    proposed(space, [0.3] * 8, 1000)
    assert space.drawn == pytest.approx(50, abs=20)


def test_first_eight_trials_are_random() -> None:
    space = Counting(REAL)
    proposed(space, [0.3] * 7, 20)
    assert space.drawn == 20


def test_third_of_proposals_uses_density_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    log_density = Mixture.log_density
    monkeypatch.setattr(
        Mixture, "log_density", lambda self, at: calls.append(1) or log_density(self, at)
    )
    proposed(Space(REAL), [0.1 * i for i in range(9)], 600)
    assert len(calls) / 2 == pytest.approx(0.33 * 0.95 * 600, abs=35)


@pytest.mark.usefixtures("densities")
def test_best_tenth_counts_as_good() -> None:
    drawn = proposed(Space(REAL), [0.1, 0.1, 0.9] + [0.5] * 17, 300)
    assert sum(value < 0.3 for value in drawn) > 0.85 * len(drawn)
    assert sum(abs(value - 0.9) < 0.1 for value in drawn) < 0.05 * len(drawn)


@pytest.mark.usefixtures("densities")
@pytest.mark.parametrize(
    ("judged", "good", "bad"), [(8, 1, 7), (21, 3, 18), (250, 25, 100), (400, 25, 100)]
)
def test_good_and_bad_sets_include_pending_as_bad(
    judged: int, good: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtures: list[list[float]] = []

    class RecordingMixture(Mixture):
        def __init__(self, dimensions: Any, points: Any) -> None:
            super().__init__(dimensions, points)
            mixtures.append([float(point[0]) for point in points])

    monkeypatch.setattr("zerolab.extensions.searcher_tpe.proposals.Mixture", RecordingMixture)
    ladder, points = at_full_length([trial_id / 1000 for trial_id in range(judged)])
    pending = [judged, judged + 1]
    points |= {trial_id: (trial_id / 1000,) for trial_id in pending}
    seed = next(seed for seed in range(99) if Random(seed).random() > 0.05)
    Proposer(Space(REAL)).propose(ladder, points, pending, Random(seed))
    best, bad_points = mixtures
    assert best == [points[i][0] for i in range(good)]
    assert bad_points[bad:] == [points[i][0] for i in pending]
    assert len(set(bad_points[:bad])) == bad
    assert set(bad_points[:bad]) <= {points[i][0] for i in range(good, judged)}
    assert max(bad_points[:bad]) > (
        points[judged // 2][0] or 0.0
    )  # sampled from all, not only the best


@pytest.mark.usefixtures("process")
def test_process_interpolates_unvisited_minimum() -> None:
    ladder, points = Ladder(1), {}
    for trial_id, x in enumerate(np.linspace(0, 1, 11)):
        points[trial_id] = (float(x),)
        ladder.insert(0, (x - 0.55) ** 2, trial_id)  # 0.5 and 0.6 are alike
    proposer = Proposer(Space(REAL))
    drawn = [proposer.propose(ladder, points, [], Random(seed))[0] for seed in range(20)]
    assert all(abs((x or 0.0) - 0.55) < 0.03 for x in drawn)


@pytest.mark.usefixtures("process")
def test_process_avoids_points_in_training() -> None:
    ladder, points = Ladder(1), {}
    for trial_id, x in enumerate(np.linspace(0, 0.5, 9)):
        points[trial_id] = (float(x),)
        ladder.insert(0, -x, trial_id)  # values beyond 0.5 are unknown
    first = Proposer(Space(REAL)).propose(ladder, points, [], Random(1))
    points[99] = first
    again = Proposer(Space(REAL)).propose(ladder, points, [99], Random(1))
    assert abs((again[0] or 0.0) - (first[0] or 0.0)) > 0.02


def ladder_of(space: Space, trials: int, top: int) -> tuple[Ladder, dict[int, Point]]:
    """Return a ladder with judged trials, of which the first ``top`` reached the top rung."""
    ladder, points = Ladder(27), {}
    for trial_id in range(trials):
        points[trial_id] = space.point(Random(trial_id))
        value = Random(f"value {trial_id}").random()
        if trial_id < top:
            for length in (1, 3, 9):
                ladder.record_intermediate(length, value, trial_id)
            ladder.insert(3, value, trial_id)
        else:
            ladder.insert(0, value, trial_id)
    return ladder, points


@pytest.mark.parametrize(
    ("trials", "top", "rung", "counts"),
    [
        (12, 3, 0, [12]),  # three results at the top are too few
        (12, 4, 3, [12, 4, 4, 4]),
        (90, 0, 0, [90]),
        (300, 0, 0, [100]),
        (300, 30, 3, [20, 20, 30, 30]),
        (900, 200, 3, [5, 20, 25, 50]),
    ],
)
def test_training_set_is_limited_per_rung(
    trials: int, top: int, rung: int, counts: list[int]
) -> None:
    ladder, _ = ladder_of(Space(REAL), trials, top)
    results = proposals._training_set(ladder)
    assert results.rung == rung
    assert np.bincount(results.rungs).tolist() == counts
    assert len(results.scores) == len(results.trials) == sum(counts)
    values = ladder.values_by_rung()[rung]
    order = sorted(values, key=lambda trial_id: (values[trial_id], trial_id))
    assert results.best == order[: len(results.best)]
    of_rung = [i for i, r in zip(results.trials, results.rungs, strict=True) if r == rung]
    assert of_rung[: len(of_rung) // 2] == order[: len(of_rung) // 2]
    assert of_rung[-1] == order[-1]


@pytest.mark.usefixtures("process")
def test_shape_is_refitted_after_an_eighth_more_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fits = []
    fit = proposals.GaussianProcess._fit
    monkeypatch.setattr(proposals.GaussianProcess, "_fit", lambda self: fits.append(1) or fit(self))
    space = Space(MIXED)
    proposer = Proposer(space)
    counted = []
    for trials in range(50, 80):
        ladder, points = ladder_of(space, trials, 0)
        proposer.propose(ladder, points, [], Random(trials))
        counted.append(len(fits))
    grown = [trials for trials, (a, b) in enumerate(pairwise(counted), 51) if b > a]
    assert (counted[0], grown) == (1, [57, 64, 72])


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("seed", range(3))
def test_proposals_lie_in_the_space(seed: int) -> None:
    space = Space(MIXED)
    ladder, points = ladder_of(space, 40, 6)
    proposer = Proposer(space)
    for trial_id in range(40, 60):
        point = proposer.propose(ladder, points, [39], Random(f"{seed} {trial_id}"))
        hparams = space.hparams(point)
        assert ("y" in hparams) == (hparams["kind"] == "b")
        assert space.read(hparams) == pytest.approx(point)


@pytest.mark.usefixtures("process")
def test_pending_trials_are_limited_to_newest_200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weighed = []
    predict = proposals.GaussianProcess.predict
    monkeypatch.setattr(
        proposals.GaussianProcess,
        "predict",
        lambda self, rung, candidates, training: (
            weighed.append(training[:, 0].tolist()) or predict(self, rung, candidates, training)
        ),
    )
    ladder, points = at_full_length([0.1 * i for i in range(9)])
    begun = {trial_id: (trial_id / 1000,) for trial_id in range(100, 350)}
    Proposer(Space(REAL)).propose(ladder, points | begun, list(begun), Random(1))
    assert weighed == [[trial_id / 1000 for trial_id in range(150, 350)]]


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("leaves", "fits"), [(30, 1), (31, 0)])
def test_large_space_skips_the_process(
    leaves: int, fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = []
    fit = proposals.GaussianProcess._fit
    monkeypatch.setattr(
        proposals.GaussianProcess, "_fit", lambda self: fitted.append(1) or fit(self)
    )
    many = {"type": "categorical", "vals": list(range(300))}
    space = Space({f"c{index}": many for index in range(leaves)})
    ladder, points = ladder_of(space, 12, 0)
    Proposer(space).propose(ladder, points, [], Random(1))
    assert len(fitted) == fits


@pytest.mark.usefixtures("process")
def test_fit_size_ignores_candidates_and_pending_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted = []
    fit = proposals.GaussianProcess._fit
    monkeypatch.setattr(
        proposals.GaussianProcess,
        "_fit",
        lambda self: fitted.append(self._used.shape[1]) or fit(self),
    )
    many = {"type": "categorical", "vals": list(range(1000))}
    space = Space({f"c{index}": many for index in range(5)})
    ladder, points = ladder_of(space, 12, 0)
    begun = {100 + i: space.point(Random(i)) for i in range(100)}
    Proposer(space).propose(ladder, points | begun, list(begun), Random(1))
    assert len(fitted) == 1
    assert fitted[0] <= 5 * 12


def test_conditional_number_has_two_features() -> None:
    kinds = {"kind": {"type": "categorical", "vals": ["a", "b"]}}
    leaf = {"type": "double", "minval": 0, "maxval": 1, "when": {"kind": "a"}}
    for leaves, is_wide in ((1499, False), (1500, True)):
        dimensions = Space(kinds | {"x": leaf}).dimensions
        space = Space({})
        space.dimensions = (dimensions[0], *[dimensions[1]] * leaves)
        assert Proposer(space)._is_wide is is_wide


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("finite", [4, 9])
def test_failed_trials_are_not_perturbed(finite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    add_candidates = Proposer._add_candidates
    monkeypatch.setattr(
        Proposer,
        "_add_candidates",
        lambda self, *arguments: seen.append(arguments[1]) or add_candidates(self, *arguments),
    )
    ladder, points = Ladder(3), {}
    for trial_id in range(200):
        points[trial_id] = (trial_id / 200,)
        if trial_id < 20:
            ladder.insert(0, trial_id, trial_id)
        else:
            ladder.insert(1, trial_id if trial_id < 20 + finite else math.inf, trial_id)
    Proposer(Space(REAL)).propose(ladder, points, [], Random(1))
    assert [len(best) for best in seen] == [finite]


@pytest.mark.usefixtures("process")
def test_concurrent_proposals_use_one_blas_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server proposes in its writer thread, and replays searches in reader threads."""
    inside, both = [], threading.Barrier(2)
    predict = proposals.GaussianProcess.predict

    def slow(self: Any, *arguments: Any) -> Any:
        inside.append(1)
        time.sleep(0.05)
        counts.append(len(inside))
        inside.pop()
        return predict(self, *arguments)

    def propose(seed: int) -> None:
        both.wait()
        ladder, points = at_full_length([0.1 * i for i in range(9)])
        Proposer(Space(REAL)).propose(ladder, points, [], Random(seed))

    counts: list[int] = []
    monkeypatch.setattr(proposals.GaussianProcess, "predict", slow)
    with threadpool_limits(2, user_api="blas"):
        threads = [threading.Thread(target=propose, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(blas_threads()) == {2}
    assert counts == [1, 1]


@pytest.mark.usefixtures("process")
def test_proposal_restores_blas_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    predict = proposals.GaussianProcess.predict
    monkeypatch.setattr(
        proposals.GaussianProcess,
        "predict",
        lambda self, *arguments: seen.append(blas_threads()) or predict(self, *arguments),
    )
    with threadpool_limits(2, user_api="blas"):
        proposed(Space(REAL), [0.1 * i for i in range(9)], 1)
        assert set(blas_threads()) == {2}
    assert set(seen[0]) == {1}


def test_constant_space_needs_no_model() -> None:
    ladder, points = at_full_length([0.5] * 9)
    constant = Space({"x": {"type": "const", "val": 3}})
    assert Proposer(constant).propose(ladder, points, [], Random(0)) == ()
