"""Candidate points for the next trial."""

from random import Random

import numpy as np
import pytest

from zerolab.extensions.searcher_tpe.candidates import perturb, sample_uniform, snap_rows, to_rows
from zerolab.schema.space import Space

SPACE = Space(
    {
        "kind": {"type": "categorical", "vals": ["a", "b", "c"]},
        "inner": {"type": "categorical", "vals": [1, 2], "when": {"kind": ["a", "b"]}},
        "n": {"type": "int", "minval": 1, "maxval": 5},
        "x": {"type": "double", "minval": -3, "maxval": 3},
        "y": {"type": "log", "minval": -4, "maxval": 0, "when": {"inner": 2}},
    }
)
DIMENSIONS = SPACE.dimensions
NAMES = [dimension.name for dimension in DIMENSIONS]


def test_snap_rows_matches_snap_of_points() -> None:
    drawn = sample_uniform(DIMENSIONS, 500, Random(1))
    rows = snap_rows(DIMENSIONS, drawn)
    one_by_one = to_rows([SPACE.snap(row) for row in drawn.tolist()], len(DIMENSIONS))
    np.testing.assert_array_equal(rows, one_by_one)
    assert np.isnan(rows[:, NAMES.index("y")]).mean() == pytest.approx(2 / 3, abs=0.07)


def test_sample_uniform_covers_space() -> None:
    drawn = sample_uniform(DIMENSIONS, 3000, Random(2))
    for name, size in (("kind", 3), ("inner", 2)):
        shares = np.bincount(drawn[:, NAMES.index(name)].astype(int)) / 3000
        assert shares == pytest.approx([1 / size] * size, abs=0.04)
    counts, _ = np.histogram(drawn[:, NAMES.index("x")], 10, (0, 1))
    assert counts == pytest.approx([300] * 10, abs=75)


def test_perturb_moves_half_with_three_widths() -> None:
    start = to_rows([SPACE.snap([0, 1, 0.5, 0.5, 0.5])], len(DIMENSIONS))
    rows = perturb(DIMENSIONS, start, 3000, Random(3))
    x = rows[:, NAMES.index("x")]
    assert (x == 0.5).mean() == pytest.approx(0.5, abs=0.04)
    for turn, width in enumerate((0.2, 0.08, 0.03)):
        of_width = x[turn::3]
        assert np.std(of_width[of_width != 0.5]) == pytest.approx(width, rel=0.1)
    n = snap_rows(DIMENSIONS, rows)[:, NAMES.index("n")]
    assert (n[2::3] != n[0]).mean() > 0.1  # integers also move where widths are small
    kind = rows[:, NAMES.index("kind")]
    assert (kind != 0).mean() == pytest.approx(0.5 * 0.3 * 2 / 3, abs=0.03)


def test_perturb_stays_in_bounds_and_uses_all_points() -> None:
    starts = to_rows([SPACE.point(Random(seed)) for seed in range(3)], len(DIMENSIONS))
    rows = perturb(DIMENSIONS, starts, 600, Random(4))
    assert not np.isnan(rows).any()
    assert ((rows >= 0) & (rows <= 2)).all()
    x = NAMES.index("x")
    assert [(rows[:, x] == start).mean() > 0.1 for start in starts[:, x]] == [True] * 3


def test_same_seed_gives_same_candidates() -> None:
    starts = to_rows([SPACE.point(Random(0))], len(DIMENSIONS))
    first, second = (perturb(DIMENSIONS, starts, 9, Random(5)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
