"""Objectives from measured learning curves: a point has the curve of its nearest neighbour."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.searching.objective import Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, whole
from zerolab.schema.space import Space

SPACES: dict[str, dict[str, Any]] = {
    "digits mlp": {
        "lr": log(-5, 0.5),
        "width": whole(4, 128),
        "layers": whole(1, 4),
        "batch_size": choice(16, 64, 256),
        "dropout": double(0, 0.8),
        "weight_decay": log(-6, 0),
        "optimizer": choice("sgd", "adam"),
        "activation": choice("relu", "tanh"),
    },
    "digits convolution": {
        "lr": log(-5, 0.5),
        "channels": whole(2, 16),
        "batch_size": choice(16, 64, 256),
        "dropout": double(0, 0.8),
        "weight_decay": log(-6, 0),
        "norm": choice(True, False),
        "optimizer": choice("sgd", "adam"),
        "momentum": double(0, 0.99) | {"when": {"optimizer": "sgd"}},
    },
}
"""Measurements of ``make_table.py``."""


def measured(name: str) -> Objective:
    """The curves of one network on the digits, as ``curves.json`` has them."""
    space = Space(SPACES[name])
    is_choice = [dimension.kind == "categorical" for dimension in space.dimensions]

    @functools.cache
    def rows() -> tuple[Any, Any]:
        table = json.loads((Path(__file__).parent / "curves.json").read_text())[name]
        points = [[math.nan if at is None else at for at in point] for point, _ in table]
        curves = [[math.nan if v is None else v for v in curve] for _, curve in table]
        return np.array(points), np.array(curves)

    def curve(hparams: dict[str, Any]) -> Curve:
        points, curves = rows()
        at = np.array([math.nan if c is None else c for c in space.read(hparams)])
        apart = np.where(is_choice, (points != at) * 0.5, points - at)
        apart = np.where(np.isnan(apart), 0.5 * (np.isnan(points) != np.isnan(at)), apart)
        nearest: Curve = curves[int((apart**2).sum(axis=1).argmin())]
        return nearest

    return Objective(name, SPACES[name], curve, steady(0.005))
