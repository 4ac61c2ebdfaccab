"""What is proposed from what is known: by two densities, and by a process over all rungs."""

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

from zerolab.schema.space import Point, Space
from zerolab.searcher.tpe import proposals
from zerolab.searcher.tpe.ladder import Ladder
from zerolab.searcher.tpe.parzen import Mixture
from zerolab.searcher.tpe.proposals import Proposer

REAL = {"x": {"type": "double", "minval": 0, "maxval": 1}}
MIXED = REAL | {
    "kind": {"type": "categorical", "vals": ["a", "b", "c"]},
    "n": {"type": "int", "minval": 1, "maxval": 9},
    "y": {"type": "log", "minval": -4, "maxval": 0, "when": {"kind": "b"}},
}


class Counting(Space):
    """Counts the points that are drawn from the whole space."""

    drawn = 0

    def point(self, rng: Random) -> Point:
        self.drawn += 1
        return super().point(rng)


@pytest.fixture
def densities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two densities choose always."""
    monkeypatch.setattr(proposals, "_BY_DENSITIES", 1.0)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process chooses always."""
    monkeypatch.setattr(proposals, "_BY_DENSITIES", 0.0)
    monkeypatch.setattr(proposals, "_UNIFORM", 0.0)


def at_full_length(points: Sequence[float]) -> tuple[Ladder, dict[int, Point]]:
    """A ladder of one rung at which so many trials were judged, best first."""
    ladder = Ladder(1)
    for trial_id in range(len(points)):
        ladder.insert(0, trial_id, trial_id)
    return ladder, {trial_id: (value,) for trial_id, value in enumerate(points)}


def blas_threads() -> list[int]:
    """How many numpy computes with; what other tests have loaded has its own."""
    return [each["num_threads"] for each in proposals._BLAS.info() if each["user_api"] == "blas"]


def proposed(space: Space, points: Sequence[float], count: int) -> list[float]:
    ladder, known = at_full_length(points)
    drawn = [Proposer(space).propose(ladder, known, [], Random(seed)) for seed in range(count)]
    return [float(point[0] or 0.0) for point in drawn]


def test_one_trial_in_twenty_is_drawn_from_the_whole_space() -> None:
    space = Counting(REAL)
    proposed(space, [0.3] * 8, 1000)
    assert space.drawn == pytest.approx(50, abs=20)


def test_before_eight_trials_were_judged_all_are_drawn_from_the_whole_space() -> None:
    space = Counting(REAL)
    proposed(space, [0.3] * 7, 20)
    assert space.drawn == 20


def test_a_third_of_the_others_is_chosen_by_two_densities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    log_density = Mixture.log_density
    monkeypatch.setattr(
        Mixture, "log_density", lambda self, at: asked.append(1) or log_density(self, at)
    )
    proposed(Space(REAL), [0.1 * i for i in range(9)], 600)
    assert len(asked) / 2 == pytest.approx(0.33 * 0.95 * 600, abs=35)


@pytest.mark.usefixtures("densities")
def test_the_best_tenth_is_good_and_the_rest_is_not() -> None:
    drawn = proposed(Space(REAL), [0.1, 0.1, 0.9] + [0.5] * 17, 300)
    assert sum(value < 0.3 for value in drawn) > 0.85 * len(drawn)
    assert sum(abs(value - 0.9) < 0.1 for value in drawn) < 0.05 * len(drawn)


@pytest.mark.usefixtures("densities")
@pytest.mark.parametrize(
    ("judged", "good", "bad"), [(8, 1, 7), (21, 3, 18), (250, 25, 100), (400, 25, 100)]
)
def test_so_many_are_good_and_bad_and_what_has_begun_is_bad_too(
    judged: int, good: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[float]] = []

    class Seen(Mixture):
        def __init__(self, dimensions: Any, points: Any) -> None:
            super().__init__(dimensions, points)
            made.append([float(point[0]) for point in points])

    monkeypatch.setattr("zerolab.searcher.tpe.proposals.Mixture", Seen)
    ladder, points = at_full_length([trial_id / 1000 for trial_id in range(judged)])
    begun = [judged, judged + 1]
    points |= {trial_id: (trial_id / 1000,) for trial_id in begun}
    seed = next(seed for seed in range(99) if Random(seed).random() > 0.05)
    Proposer(Space(REAL)).propose(ladder, points, begun, Random(seed))
    best, others = made
    assert best == [points[i][0] for i in range(good)]
    assert others[bad:] == [points[i][0] for i in begun]
    assert len(set(others[:bad])) == bad
    assert set(others[:bad]) <= {points[i][0] for i in range(good, judged)}
    assert max(others[:bad]) > (points[judged // 2][0] or 0.0)  # of all of them, not their head


@pytest.mark.usefixtures("process")
def test_the_process_goes_to_the_hollow_that_values_point_to_though_nobody_was_there() -> None:
    ladder, points = Ladder(1), {}
    for trial_id, x in enumerate(np.linspace(0, 1, 11)):
        points[trial_id] = (float(x),)
        ladder.insert(0, (x - 0.55) ** 2, trial_id)  # 0.5 and 0.6 are alike
    proposer = Proposer(Space(REAL))
    drawn = [proposer.propose(ladder, points, [], Random(seed))[0] for seed in range(20)]
    assert all(abs((x or 0.0) - 0.55) < 0.03 for x in drawn)


@pytest.mark.usefixtures("process")
def test_where_a_trial_is_under_way_no_other_one_is_sent() -> None:
    ladder, points = Ladder(1), {}
    for trial_id, x in enumerate(np.linspace(0, 0.5, 9)):
        points[trial_id] = (float(x),)
        ladder.insert(0, -x, trial_id)  # nobody knows how it goes on
    first = Proposer(Space(REAL)).propose(ladder, points, [], Random(1))
    points[99] = first
    again = Proposer(Space(REAL)).propose(ladder, points, [99], Random(1))
    assert abs((again[0] or 0.0) - (first[0] or 0.0)) > 0.02


def ladder_of(space: Space, trials: int, top: int) -> tuple[Ladder, dict[int, Point]]:
    """So many trials that were judged at the lowest rung, the first of which came to the top."""
    ladder, points = Ladder(27), {}
    for trial_id in range(trials):
        points[trial_id] = space.point(Random(trial_id))
        value = Random(f"value {trial_id}").random()
        if trial_id < top:
            for length in (1, 3, 9):
                ladder.pass_by(length, value, trial_id)
            ladder.insert(3, value, trial_id)
        else:
            ladder.insert(0, value, trial_id)
    return ladder, points


@pytest.mark.parametrize(
    ("trials", "top", "rung", "each"),
    [
        (12, 3, 0, [12]),  # three at the top say too little of it
        (12, 4, 3, [12, 4, 4, 4]),
        (90, 0, 0, [90]),
        (300, 0, 0, [100]),
        (300, 30, 3, [20, 20, 30, 30]),
        (900, 200, 3, [5, 20, 25, 50]),
    ],
)
def test_a_process_is_made_of_a_hundred_results_at_most_from_the_highest_rung_down(
    trials: int, top: int, rung: int, each: list[int]
) -> None:
    ladder, _ = ladder_of(Space(REAL), trials, top)
    results = proposals._results(ladder)
    assert results.rung == rung
    assert np.bincount(results.rungs).tolist() == each
    assert len(results.scores) == len(results.trials) == sum(each)
    values = ladder.known()[rung]
    order = sorted(values, key=lambda trial_id: (values[trial_id], trial_id))
    assert results.best == order[: len(results.best)]
    of_rung = [i for i, r in zip(results.trials, results.rungs, strict=True) if r == rung]
    assert of_rung[: len(of_rung) // 2] == order[: len(of_rung) // 2]
    assert of_rung[-1] == order[-1]


@pytest.mark.usefixtures("process")
def test_a_shape_is_fitted_anew_when_there_is_an_eighth_more_and_never_between(
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
def test_what_is_proposed_is_a_point_of_the_space(seed: int) -> None:
    space = Space(MIXED)
    ladder, points = ladder_of(space, 40, 6)
    proposer = Proposer(space)
    for trial_id in range(40, 60):
        point = proposer.propose(ladder, points, [39], Random(f"{seed} {trial_id}"))
        hparams = space.hparams(point)
        assert ("y" in hparams) == (hparams["kind"] == "b")
        assert space.read(hparams) == pytest.approx(point)


@pytest.mark.usefixtures("process")
def test_only_the_newest_200_trials_that_nothing_is_known_of_are_weighed(
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
def test_in_a_space_of_thousands_of_categories_no_process_holds_up_the_server(
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
def test_what_is_fitted_grows_neither_with_candidates_nor_with_trials_under_way(
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


def test_a_number_that_exists_only_sometimes_is_two_features() -> None:
    kinds = {"kind": {"type": "categorical", "vals": ["a", "b"]}}
    leaf = {"type": "double", "minval": 0, "maxval": 1, "when": {"kind": "a"}}
    for leaves, is_wide in ((1499, False), (1500, True)):
        dimensions = Space(kinds | {"x": leaf}).dimensions
        space = Space({})
        space.dimensions = (dimensions[0], *[dimensions[1]] * leaves)
        assert Proposer(space)._is_wide is is_wide


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("finite", [4, 9])
def test_nobody_that_has_failed_is_moved_from(finite: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    more = Proposer._more
    monkeypatch.setattr(
        Proposer, "_more", lambda self, *known: seen.append(known[1]) or more(self, *known)
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
def test_two_that_propose_at_once_compute_on_one_core_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server proposes in the thread that writes, and replays searches in those that read."""
    inside, both = [], threading.Barrier(2)
    predict = proposals.GaussianProcess.predict

    def slow(self: Any, *known: Any) -> Any:
        inside.append(1)
        time.sleep(0.05)
        counts.append(len(inside))
        inside.pop()
        return predict(self, *known)

    def propose(seed: int) -> None:
        both.wait()
        ladder, known = at_full_length([0.1 * i for i in range(9)])
        Proposer(Space(REAL)).propose(ladder, known, [], Random(seed))

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
def test_a_proposal_computes_on_one_core_and_leaves_the_others_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    predict = proposals.GaussianProcess.predict
    monkeypatch.setattr(
        proposals.GaussianProcess,
        "predict",
        lambda self, *known: seen.append(blas_threads()) or predict(self, *known),
    )
    with threadpool_limits(2, user_api="blas"):
        proposed(Space(REAL), [0.1 * i for i in range(9)], 1)
        assert set(blas_threads()) == {2}
    assert set(seen[0]) == {1}


def test_a_space_of_constants_needs_no_process() -> None:
    ladder, points = at_full_length([0.5] * 9)
    constant = Space({"x": {"type": "const", "val": 3}})
    assert Proposer(constant).propose(ladder, points, [], Random(0)) == ()
