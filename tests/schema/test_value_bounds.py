"""Bounds given as values: ``min`` and ``max`` of int, double and log specs."""

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from zerolab.cli.main import app
from zerolab.config import check_file
from zerolab.config.files import parse_yaml
from zerolab.schema.hyperparameters import grid_points, space_problems, space_warnings
from zerolab.schema.space import Space

LOG = {"type": "log", "min": 1e-4, "max": 0.1}
OLD = {"type": "log", "base": 10, "minval": 0.0001, "maxval": 0.1}


def test_log_takes_values() -> None:
    new, old = Space({"lr": LOG}), Space({"lr": {"type": "log", "minval": -4, "maxval": -1}})
    for seed in range(50):
        value = new.sample(Random(seed))["lr"]
        assert 1e-4 <= value <= 0.1
        assert value == pytest.approx(old.sample(Random(seed))["lr"], rel=1e-9)
    for coordinate in (0.0, 0.3, 1.0):
        hparams = new.hparams((coordinate,))
        assert new.read(hparams)[0] == pytest.approx(coordinate, abs=1e-12)
    assert new.hparams((0.0,)) == {"lr": 1e-4}
    assert new.hparams((1.0,)) == {"lr": 0.1}


@pytest.mark.parametrize(("low", "high"), [(3e-4, 7e-2), (1e-300, 1e300), (2, 3), (0.5, 1)])
def test_log_values_stay_in_their_bounds(low: float, high: float) -> None:
    space = Space({"x": {"type": "log", "min": low, "max": high, "count": 5}})
    (first, *_), last = list(space.grid()), list(space.grid())[-1]
    assert first == {"x": low}
    assert last == {"x": high}
    assert all(low <= space.sample(Random(seed))["x"] <= high for seed in range(20))


def test_log_grid_is_geometric() -> None:
    points = grid_points({"lr": {**LOG, "count": 4}})
    assert [point["lr"] for point in points] == pytest.approx([1e-4, 1e-3, 1e-2, 0.1])
    (middle,) = grid_points({"lr": {**LOG, "count": 1}})
    assert middle["lr"] == pytest.approx(math.sqrt(1e-5))


@pytest.mark.parametrize("kind", ["int", "double"])
def test_other_ranges_take_the_new_names(kind: str) -> None:
    new = {"type": kind, "min": 2, "max": 9, "count": 3}
    old = {"type": kind, "minval": 2, "maxval": 9, "count": 3}
    assert grid_points({"x": new}) == grid_points({"x": old})
    assert Space({"x": new}).sample(Random(1)) == Space({"x": old}).sample(Random(1))


def test_yaml_numbers_are_read() -> None:
    content = parse_yaml("lr: {type: log, min: 1e-4, max: 0.1}\n", "x")
    assert Space(content).hparams((0.0,)) == {"lr": 1e-4}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"type": "log", "min": 0, "max": 1}, "x.min: "),
        ({"type": "log", "min": -4, "max": -1}, "x.min: "),
        ({"type": "log", "min": 1, "max": 0.1}, "x.min: must be less than max"),
        ({"type": "log", "min": 1}, "x.max: is required"),
        ({"type": "double", "max": 1}, "x.min: is required"),
        ({"type": "int", "min": 0.5, "max": 1}, "x.min: "),
        ({"type": "log", "min": 1, "maxval": 2}, "x.maxval: must not be combined with min and max"),
        ({"type": "double", "min": 1, "minval": 1, "maxval": 2}, "x.minval: must not be combined"),
        ({"type": "log", "min": 1, "max": 2, "base": 10}, "x.base: has no effect"),
    ],
)
def test_wrong_bounds_are_named(spec: dict[str, Any], problem: str) -> None:
    problems = space_problems({"x": spec})
    assert any(line.startswith(f"hyperparameters.{problem}") for line in problems), problems


@pytest.mark.parametrize("bounds", [(0.0001, 0.1), (0.5, 1), (1e-5, 1.0)])
def test_powers_that_look_like_values_warn(bounds: tuple[float, float]) -> None:
    spec = {"type": "log", "minval": bounds[0], "maxval": bounds[1]}
    (warning,) = space_warnings({"optimizer": {"lr": spec}})
    assert warning.startswith("hyperparameters.optimizer.lr: minval and maxval are powers")
    assert f"min: {bounds[0]:g}, max: {bounds[1]:g}" in warning
    assert f"{10 ** bounds[0]:.6g} to {10 ** bounds[1]:.6g}" in warning


@pytest.mark.parametrize("spec", [LOG, {"type": "log", "minval": -4, "maxval": -1},
                                  {"type": "log", "minval": 0, "maxval": 1},
                                  {"type": "double", "minval": 0.1, "maxval": 0.9}])  # fmt: skip
def test_other_bounds_do_not_warn(spec: dict[str, Any]) -> None:
    assert space_warnings({"x": spec}) == []


def experiment(directory: Path) -> Path:
    (directory / "train.py").write_text("print('hello')\n")
    file = directory / "experiment.yaml"
    searcher = {"name": "random", "metric": "loss", "max_length": 10, "max_trials": 2}
    config = {"entrypoint": "python train.py", "searcher": searcher, "hyperparameters": {"lr": OLD}}
    file.write_text(json.dumps(config))
    return file


@pytest.mark.needs_extension("experiment preview")
def test_config_check_and_preview_warn(tmp_path: Path) -> None:
    file = experiment(tmp_path)
    assert "warning: hyperparameters.lr: minval and maxval are powers" in check_file(file)
    result = CliRunner().invoke(app, ["experiment", "preview", str(file)])
    assert result.exit_code == 0, result.output
    assert "warning: hyperparameters.lr" in result.output
