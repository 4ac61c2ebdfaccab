"""Objectives whose spaces depend on a choice."""

import math
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, unit, whole

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)


def optimizers() -> Objective:
    """An optimizer and its own settings; a rate that is too high diverges."""

    def curve(hparams: dict[str, Any]) -> Curve:
        kind = hparams["optimizer"]
        rate = math.log10(hparams["lr"])
        ideal = {"sgd": -1.2, "adam": -3.0, "lamb": -2.3}[kind]
        end = {"sgd": 0.16, "adam": 0.12, "lamb": 0.2}[kind] + 0.06 * (rate - ideal) ** 2
        limit = ideal + 1.1
        if kind == "sgd":
            momentum = hparams["momentum"]
            end += 0.25 * (momentum - 0.9) ** 2
            end += 0.0 if hparams["nesterov"] else 0.015
            limit -= 0.6 * momentum
        elif kind == "adam":
            end += 0.02 * (math.log10(hparams["eps"]) + 6.5) ** 2 / 4
            end += 0.15 * (hparams["beta"] - 0.93) ** 2
        end += 0.12 * (unit(hparams["width"], 8, 128) - 0.75) ** 2
        speed = 0.55 + 0.12 * (rate - ideal) + (0.3 if kind == "adam" else 0.0)
        values: Curve = end + 0.9 * _T ** -max(speed, 0.15)
        if rate > limit:
            values[int(max(0.0, 8 - 10 * (rate - limit))) :] = math.nan
        return values

    space: dict[str, Any] = {
        "optimizer": choice("sgd", "adam", "lamb"),
        "lr": log(-5, 0),
        "width": whole(8, 128),
        "momentum": double(0, 0.99) | {"when": {"optimizer": "sgd"}},
        "nesterov": choice(True, False) | {"when": {"optimizer": "sgd"}},
        "eps": log(-10, -3) | {"when": {"optimizer": "adam"}},
        "beta": double(0.8, 0.999) | {"when": {"optimizer": "adam"}},
    }
    return Objective("conditional optimizer", space, curve, steady(0.008))


def plateau() -> Objective:
    """Twelve dimensions, half of them conditional; most of the space is a plateau."""
    wanted = [0.3, 0.7, 0.45, 0.6, 0.25, 0.8]

    def curve(hparams: dict[str, Any]) -> Curve:
        block = hparams["block"]
        names = [f"{block}{i}" for i in range(3)] if block != "none" else []
        shift = {"conv": 0.0, "mix": 0.12, "none": 0.0}[block]
        off = [abs(hparams[f"x{i}"] - wanted[i]) for i in range(4)]
        off += [abs(hparams[name] - wanted[3 + i] - shift) for i, name in enumerate(names)]
        depth = abs(hparams["depth"] - 5) / 8
        far = sum(o**2 for o in off) * (7 / len(off)) + depth**2
        end = 1 - {"conv": 0.8, "mix": 0.7, "none": 0.35}[block] * math.exp(-2.2 * far)
        end += {"relu": 0.02, "gelu": 0.0, "tanh": 0.06}[hparams["act"]]
        # what is on the plateau looks alike early
        late = 1 / (1 + np.exp(-(_T - 4 - 6 * hparams["x0"]) / 2))
        return 1.1 - (1.1 - end) * (0.25 + 0.75 * late)

    space: dict[str, Any] = {
        "block": choice("conv", "mix", "none"),
        "act": choice("relu", "gelu", "tanh"),
        "depth": whole(1, 12),
    }
    space |= {f"x{i}": double(0, 1) for i in range(4)}
    for block in ("conv", "mix"):
        space |= {f"{block}{i}": double(0, 1) | {"when": {"block": block}} for i in range(3)}
    return Objective("conditional plateau", space, curve, steady(0.01))
