"""Objectives whose short trainings are traps: they tell nothing of the end, or its opposite."""

import math
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, unit, whole

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)


def waiting() -> Objective:
    """Nothing at all is seen before half of a training; when it falls says nothing of how far."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, decay = unit(math.log10(hparams["lr"]), -5, -1), hparams["decay"]
        width, warm = unit(hparams["width"], 8, 64), hparams["warmup"] / 10
        end = 0.1 + 0.9 * (rate - 0.6) ** 2 + 0.4 * (decay - 0.3) ** 2
        end += 0.3 * (width - 0.7) ** 2 + (0.08 if hparams["norm"] == "none" else 0.0)
        begins = 14 + 9 * warm
        fallen: Curve = 1 / (1 + np.exp(-(_T - begins) / 0.5))
        return 1.0 - (1.0 - min(end, 0.95)) * fallen

    space: dict[str, Any] = {"lr": log(-5, -1), "decay": double(0, 1), "width": whole(8, 64)}
    space |= {"warmup": double(0, 10), "norm": choice("batch", "none")}
    return Objective("waiting", space, curve, steady(0.01))


def reversed_late() -> Objective:
    """Three quarters of a training rank the wrong way round."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = [hparams[f"x{i}"] for i in range(4)]
        off = (x[0] - 0.25) ** 2 + (x[1] - 0.6) ** 2 + 0.5 * (x[2] - 0.8) ** 2
        off += 0.3 * (x[3] - x[0]) ** 2
        end = 0.1 + off
        late = 1 / (1 + np.exp((_T - 21) / 1.2))
        start: Curve = 1.9 - 0.7 * off + 0.4 * _T**-0.5
        return end + (start - end) * late

    space = {f"x{i}": double(0, 1) for i in range(4)}
    return Objective("reversed late", space, curve, steady(0.01))


def lottery() -> Objective:
    """Short trainings are a lottery: what they show belongs to the configuration alone."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = [hparams[f"x{i}"] for i in range(5)] + [hparams["n"] / 20]
        end = 0.1 + sum(
            w * (a - b) ** 2
            for w, a, b in zip(
                (1, 0.8, 0.6, 0.4, 0.2, 0.6), x, (0.3, 0.7, 0.5, 0.2, 0.9, 0.4), strict=True
            )
        )
        luck = 0.9 + 0.5 * math.sin(1e4 * (sum((i + 2) * a for i, a in enumerate(x))))
        late = 1 / (1 + np.exp((_T - 15) / 1.5))
        return end + (luck + 0.3 * _T**-0.5 - end) * late

    space = {f"x{i}": double(0, 1) for i in range(5)} | {"n": whole(0, 20)}
    return Objective("lottery", space, curve, steady(0.01))


def diverging() -> Objective:
    """The higher the rate the better it looks, until it diverges: after a third or later."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, momentum = unit(math.log10(hparams["lr"]), -4, 1), hparams["momentum"]
        clip, decay = unit(math.log10(hparams["clip"]), -2, 1), hparams["decay"]
        heat = rate + 0.2 * momentum - 0.1 * (1 - clip)
        end = 0.1 + 0.6 * max(0.62 - heat, 0) + 0.25 * (decay - 0.35) ** 2
        end += 0.1 * (clip - 0.5) ** 2 + 0.1 * (momentum - 0.85) ** 2
        values: Curve = end + 1.1 * _T ** -(0.2 + 0.8 * heat)
        if heat > 0.65:
            values[int(max(0.0, 26 - 60 * (heat - 0.65))) :] = math.nan
        return values

    space = {"lr": log(-4, 1), "momentum": double(0, 0.99), "clip": log(-2, 1)}
    space["decay"] = double(0, 1)
    return Objective("diverging late", space, curve, steady(0.01))


def steps() -> Objective:
    """The rate falls at 1/3 and 2/3 of a training; what each fall brings is not seen before."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, factor = unit(math.log10(hparams["lr"]), -3, 0), unit(hparams["factor"], 2, 20)
        depth, drop = unit(hparams["depth"], 2, 20), hparams["dropout"] / 0.6
        kind = {"a": 0.0, "b": 0.05, "c": 0.1}[hparams["kind"]]
        plateau = 0.5 + 0.5 * (rate - 0.3) ** 2 + kind / 2
        second = 0.2 - 0.3 * (rate - 0.8) ** 2 - 0.2 * (factor - 0.4) ** 2
        third = 0.2 - 0.4 * (depth - 0.7) ** 2 - 0.2 * (drop - 0.5 * depth) ** 2 - kind
        value = plateau + 0.6 * np.exp(-_T / 2)
        value -= max(second, 0.0) * (_T > 9) * (1 - np.exp(-(_T - 9).clip(0)))
        value -= max(third, 0.0) * (_T > 18) * (1 - np.exp(-(_T - 18).clip(0)))
        return np.asarray(value, dtype=float)

    space: dict[str, Any] = {"lr": log(-3, 0), "factor": double(2, 20), "depth": whole(2, 20)}
    space |= {"dropout": double(0, 0.6), "kind": choice("a", "b", "c")}
    return Objective("steps", space, curve, steady(0.008))
