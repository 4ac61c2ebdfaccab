import math
import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.config import grid_points, sample_hyperparameters
from zerolab.errors import ConfigError
from zerolab.schema.hyperparameters import extremes, grid_size, space_problems
from zerolab.schema.space import Space

CONDITIONAL: dict[str, Any] = {
    "optimizer": {"type": "categorical", "vals": ["sgd", "adam", "none"]},
    "momentum": {"type": "double", "minval": 0, "maxval": 0.9, "when": {"optimizer": "sgd"}},
    "adam": {
        "beta": {"type": "double", "minval": 0.8, "maxval": 1, "when": {"optimizer": "adam"}},
        "amsgrad": {"type": "categorical", "vals": [True, False], "when": {"optimizer": ["adam"]}},
        "window": {"type": "int", "minval": 1, "maxval": 5, "when": {"adam.amsgrad": True}},
    },
    "lr": {
        "type": "log", "base": 10, "minval": -4, "maxval": -1,
        "when": {"optimizer": ["sgd", "adam"]},
    },
    "layers": [
        {"width": {"type": "int", "minval": 1, "maxval": 9}},
        {"type": "int", "minval": 10, "maxval": 19, "when": {"depth": 2}},
        {"type": "categorical", "vals": ["relu", "gelu"]},
    ],
    "depth": {"type": "categorical", "vals": [1, 2]},
    "fixed": {"type": "const", "val": 7, "when": {"depth": 2}},
}  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_conditional_leaf_exists_iff_condition_holds(seed: int) -> None:
    sample = sample_hyperparameters(CONDITIONAL, Random(seed))
    kind, adam = sample["optimizer"], sample["adam"]
    assert ("momentum" in sample) == (kind == "sgd")
    assert ("beta" in adam) == ("amsgrad" in adam) == (kind == "adam")
    assert ("window" in adam) == (kind == "adam" and adam["amsgrad"])
    assert ("lr" in sample) == (kind != "none")
    assert ("fixed" in sample) == (sample["depth"] == 2)
    assert len(sample["layers"]) == 1 + sample["depth"]
    assert sample["layers"][-1] in ("relu", "gelu")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_read_inverts_hparams(seed: int) -> None:
    space = Space(CONDITIONAL)
    point = space.point(Random(seed))
    hparams = space.hparams(point)
    assert hparams == space.sample(Random(seed))
    again = space.read(hparams)
    assert [at is None for at in again] == [at is None for at in point]
    assert [at or 0.0 for at in again] == pytest.approx([at or 0.0 for at in point], abs=1e-12)


def test_categorical_precedes_dependents() -> None:
    dimensions = Space(CONDITIONAL).dimensions
    names = [dimension.name for dimension in dimensions]
    assert sorted(names) == sorted(
        [
            "optimizer", "momentum", "adam.beta", "adam.amsgrad", "adam.window", "lr", "depth",
            "layers[0].width", "layers[1]", "layers[2]",
        ]
    )  # fmt: skip
    for position, dimension in enumerate(dimensions):
        assert all(parent < position for parent, _ in dimension.when)
    by_name = dict(zip(names, dimensions, strict=True))
    assert by_name["lr"].when == ((names.index("optimizer"), frozenset({0, 1})),)
    assert (by_name["lr"].kind, by_name["lr"].size) == ("log", 0)
    assert (by_name["layers[1]"].kind, by_name["layers[1]"].size) == ("int", 10)


def test_coordinates_are_linear_in_range_and_powers() -> None:
    space = Space(
        {
            "a": {"type": "int", "minval": 3, "maxval": 6},
            "b": {"type": "double", "minval": -1, "maxval": 1},
            "c": {"type": "log", "minval": -4, "maxval": 0},
            "d": {"type": "categorical", "vals": ["x", "y"]},
        }
    )
    assert space.hparams((0.6, 0.25, 0.5, 1.0)) == {"a": 5, "b": -0.5, "c": 0.01, "d": "y"}
    point = space.read({"a": 5, "b": -0.5, "c": 0.01, "d": "y"})
    assert [at or 0.0 for at in point] == pytest.approx([0.625, 0.25, 0.5, 1.0])
    assert space.snap([0.999, 0.3, 0.3, 0]) == (0.875, 0.3, 0.3, 0.0)
    assert space.hparams((1.0, 1.0, 1.0, 0.0)) == {"a": 6, "b": 1.0, "c": 1.0, "d": "x"}


def test_hyperparameters_of_another_space_are_rejected() -> None:
    space = Space({"n": [{"type": "categorical", "vals": [1, 2]}]})
    with pytest.raises(ConfigError, match=r"n\[0\]: must be one of \[1, 2\], got 3"):
        space.read({"n": [3]})
    with pytest.raises(ConfigError, match=r"n\[0\]: must be one of \[1, 2\], got True"):
        space.read({"n": [True]})
    with pytest.raises(ConfigError, match=r"n\[0\]: is required"):
        space.read({"n": []})


PRINT_SAMPLE = """
from random import Random
from zerolab.config import sample_hyperparameters
from tests.schema.test_space import CONDITIONAL
for seed in range(20):
    print(sample_hyperparameters(CONDITIONAL, Random(seed)))
"""


def test_samples_ignore_key_order_and_hash_seed() -> None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return [reversed_keys(item) for item in value] if isinstance(value, list) else value

    for seed in range(20):
        expected = sample_hyperparameters(CONDITIONAL, Random(seed))
        assert sample_hyperparameters(reversed_keys(CONDITIONAL), Random(seed)) == expected
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT_SAMPLE],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert len(printed) == 1


def test_recorded_sample_is_reproduced() -> None:
    # Recorded once: a change here changes the trials of every repeated experiment.
    space = {
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
        "width": {"type": "int", "minval": 16, "maxval": 512},
        "drop": [{"type": "double", "minval": 0, "maxval": 0.5}],
        "act": {"type": "categorical", "vals": ["relu", "gelu", "silu"]},
    }
    assert sample_hyperparameters(space, Random("trial 1 of 7")) == {
        "lr": 0.0001595936058831151,
        "width": 359,
        "drop": [0.009620678644373548],
        "act": "relu",
    }


@given(st.floats(0, 1), st.floats(-8, 8), st.floats(1.5, 20))
def test_powers_are_exact_to_last_digits(at: float, low: float, base: float) -> None:
    space = Space({"x": {"type": "log", "base": base, "minval": low, "maxval": low + 1}})
    assert space.hparams((at,))["x"] == pytest.approx(base ** (low + at), rel=1e-14)


def test_grid_has_each_combination_once() -> None:
    space = {
        "act": {"type": "categorical", "vals": ["none", "slope"]},
        "slope": {
            "type": "double", "minval": 0, "maxval": 1, "count": 3, "when": {"act": "slope"},
        },
        "n": {"type": "int", "minval": 1, "maxval": 2, "count": 2},
    }  # fmt: skip
    points = grid_points(space)
    assert len(points) == len({str(sorted(point.items())) for point in points}) == 2 * (1 + 3)
    assert {point.get("slope") for point in points} == {None, 0.0, 0.5, 1.0}
    assert all(("slope" in point) == (point["act"] == "slope") for point in points)


@given(st.data())
def test_grid_size_matches_grid_points(data: st.DataObject) -> None:
    space: dict[str, Any] = {}
    for index in range(data.draw(st.integers(1, 6))):
        vals = list(range(data.draw(st.integers(1, 3))))
        above = data.draw(
            st.lists(st.sampled_from(sorted(space)), max_size=2) if space else st.just([])
        )
        when = {name: data.draw(st.sampled_from(space[name]["vals"])) for name in above}
        space[f"{9 - index}"] = {"type": "categorical", "vals": vals, "when": when}
    points = {str(sorted(point.items())) for point in grid_points(space)}
    assert len(points) == len(grid_points(space)) == grid_size(space)


def test_grid_limit_counts_existing_points() -> None:
    many = {"type": "double", "minval": 0, "maxval": 1, "count": 60}
    space: dict[str, Any] = {"kind": {"type": "categorical", "vals": ["a", "b", "c"]}}
    space |= {f"x{kind}": {**many, "when": {"kind": kind}} for kind in "abc"}
    assert space_problems(space, grid=True) == []
    assert len(grid_points(space)) == grid_size(space) == 180
    space["y"] = {**many, "count": 1000}
    (problem,) = space_problems(space, grid=True)
    assert "at most 100,000 points, got more" in problem
    deep = {f"c{i:02}": {"type": "categorical", "vals": [1, 2]} for i in range(17)}
    deep |= {f"x{i}": {**many, "when": {"c00": 2, "c16": 2}} for i in range(480)}
    (problem,) = space_problems(deep, grid=True)  # enumerated, they would take minutes
    assert "at most 100,000 points, got more" in problem
    (problem,) = space_problems({f"x{i}": {"type": "const", "val": i} for i in range(501)})
    assert problem == "hyperparameters: must hold at most 500 specs, got 501"


def test_extremes_reach_conditional_leaves() -> None:
    samples = extremes(CONDITIONAL)
    windows = {sample["adam"].get("window") for sample in samples}
    assert windows == {None, 1, 5}
    assert {sample.get("momentum") for sample in samples} == {None, 0.0, 0.9}
    seconds = {sample["layers"][1] for sample in samples if len(sample["layers"]) == 3}
    assert seconds == {10, 19}


def leaf(**more: Any) -> dict[str, Any]:
    return {"type": "double", "minval": 0, "maxval": 1, **more}


KIND = {"type": "categorical", "vals": ["a", "b"]}


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        (
            {"kind": KIND, "x": leaf(when={"kid": "a"})},
            "hyperparameters.x.when.kid: must be the dotted name of a categorical, got 'kid'; "
            "did you mean 'kind'?",
        ),
        (
            {"y": leaf(), "x": leaf(when={"y": 1})},
            "hyperparameters.x.when.y: must be the dotted name of a categorical, got 'y'",
        ),
        (
            {"kind": KIND, "x": leaf(when={"kind": ["a", "c"]})},
            "hyperparameters.x.when.kind: must be one of ['a', 'b'], or a list of such values, "
            "got ['a', 'c']",
        ),
        (
            {"kind": KIND, "x": leaf(when={"kind": []})},
            "hyperparameters.x.when.kind: must be one of ['a', 'b']",
        ),
        (
            {
                "a": {**KIND, "when": {"b": "a"}},
                "b": {**KIND, "when": {"a": "a"}},
            },
            "hyperparameters.a.when: must not depend on what depends on it",
        ),
        ({"x": leaf(when="kind")}, "hyperparameters.x.when: "),
        ({"x": leaf(minval=-1e308, maxval=1e308)}, "hyperparameters.x.maxval: must not be so far"),
        (
            {"x": {"type": "log", "base": 1, "minval": 0, "maxval": 1}},
            "hyperparameters.x.base: must not be 1",
        ),
        (
            {"x": {"type": "log", "minval": 0, "maxval": 400}},
            "hyperparameters.x.maxval: minval and maxval are powers of base",
        ),
    ],
)
def test_invalid_space_is_rejected_by_key(space: dict[str, Any], problem: str) -> None:
    assert any(line.startswith(problem) for line in space_problems(space)), space_problems(space)
    with pytest.raises(ConfigError):
        Space(space)


def test_integers_are_uniform_including_both_ends() -> None:
    space = Space({"n": {"type": "int", "minval": -1, "maxval": 1}})
    drawn = [space.sample(Random(seed))["n"] for seed in range(3000)]
    assert all(abs(drawn.count(n) - 1000) < 4 * math.sqrt(1000) for n in (-1, 0, 1))


def test_type_key_of_container_may_be_searched() -> None:
    optimizer = {
        "type": {"type": "categorical", "vals": ["SGD", "AdamW"]},
        "params": {
            "momentum": {
                "type": "double", "minval": 0, "maxval": 1, "when": {"optimizer.type": "SGD"},
            },
        },
    }  # fmt: skip
    assert space_problems({"optimizer": optimizer}) == []
    for seed in range(20):
        sample = sample_hyperparameters({"optimizer": optimizer}, Random(seed))["optimizer"]
        assert ("momentum" in sample["params"]) == (sample["type"] == "SGD")
    assert space_problems({"optimizer": {"type": 3}})
