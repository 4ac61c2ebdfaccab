"""Objectives on which no variant was chosen: written before the choice, and run after it.

Of the kinds that had been hard, and of some that had not: falls that come at once and late,
families that cross late, noise with outliers, long plateaus, divergence, overfitting, nested
conditions, and short trainings that tell the truth.
"""

import math
from random import Random
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, unit, whole

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)


def staircase() -> Objective:
    """A loss that falls in up to four steps at once; who will end lowest takes them later."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, noise = unit(math.log10(hparams["lr"]), -5, -2), hparams["augment"]
        size = unit(hparams["blocks"], 1, 10)
        kind = {"plain": 0.0, "gated": 0.35, "mixed": 0.2}[hparams["kind"]]
        pace = 2.5 + 3.5 * noise + 2 * size + 2.5 * abs(rate - 0.6) - kind
        height = 0.26 - 0.25 * (rate - 0.6) ** 2 - 0.1 * (size - 0.75) ** 2
        height -= 0.12 * (noise - 0.55) ** 2 + 0.03 * (0.35 - kind)
        taken = sum(1 / (1 + np.exp(-(_T - pace * step) / 0.3)) for step in range(1, 5))
        return np.asarray(1.3 - height * taken - 0.05 * noise, dtype=float)

    space: dict[str, Any] = {"lr": log(-5, -2), "augment": double(0, 1), "blocks": whole(1, 10)}
    space["kind"] = choice("plain", "gated", "mixed")
    return Objective("staircase", space, curve, steady(0.01))


def families() -> Objective:
    """Of three families the quick ones lead for most of a training, and the slow one wins."""

    def curve(hparams: dict[str, Any]) -> Curve:
        family = hparams["family"]
        rate = unit(math.log10(hparams["lr"]), -5, 0)
        if family == "linear":
            end, speed = 0.42 + 0.3 * (rate - 0.7) ** 2, 2.0
        elif family == "trees":
            deep = unit(hparams["leaves"], 4, 256)
            end, speed = 0.3 + 0.3 * (deep - 0.5) ** 2 + 0.1 * (rate - 0.5) ** 2, 6.0
        else:
            wide, drop = unit(hparams["width"], 16, 1024), hparams["dropout"]
            end = 0.08 + 0.5 * (rate - 0.35) ** 2 + 0.2 * (wide - 0.8) ** 2
            end += 0.2 * (drop - 0.3) ** 2
            speed = 11 + 6 * wide - 3 * rate
        return np.asarray(end + (1.1 - end) / (1 + (_T / speed) ** 3), dtype=float)

    space: dict[str, Any] = {
        "family": choice("linear", "trees", "network"),
        "lr": log(-5, 0),
        "leaves": whole(4, 256) | {"when": {"family": "trees"}},
        "width": whole(16, 1024) | {"when": {"family": "network"}},
        "dropout": double(0, 0.8) | {"when": {"family": "network"}},
    }
    return Objective("families", space, curve, steady(0.01))


def outliers() -> Objective:
    """One reported value in eight is an outlier, at any length; six dimensions."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(6)])
        end = float((np.arange(6, 0, -1) * (x - np.linspace(0.15, 0.85, 6)) ** 2).sum()) / 6
        end += 0.3 * float((x[0] - x[3]) ** 2)
        return np.asarray(end + 0.8 * _T ** -(0.5 + 0.4 * float(x[1])), dtype=float)

    def heard(rng: Random, epoch: int) -> float:
        del epoch
        off, kind = rng.gauss(0, 0.02), rng.random()
        return off + (abs(rng.gauss(0, 0.4)) if kind < 0.125 else 0.0)

    return Objective("outliers", {f"x{i}": double(0, 1) for i in range(6)}, curve, heard, True)


def slow_start() -> Objective:
    """A plateau of a third to four fifths of a training; who leaves it first ends lowest."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, scale = unit(math.log10(hparams["lr"]), -6, -1), unit(hparams["heads"], 1, 16)
        init, warm = hparams["init"], hparams["warmup"]
        off = (rate - 0.65) ** 2 + 0.5 * (init - 0.4) ** 2 + 0.3 * (scale - 0.5) ** 2
        off += 0.2 * (warm - 0.2 - 0.5 * rate) ** 2
        left = 1 / (1 + np.exp(-(_T - 9 - 20 * off) / 0.6))
        return np.asarray(1.5 - (1.4 - min(off, 1.0)) * left, dtype=float)

    space = {"lr": log(-6, -1), "heads": whole(1, 16), "init": double(0, 1)}
    space["warmup"] = double(0, 1)
    return Objective("slow start", space, curve, steady(0.015))


def edge() -> Objective:
    """A third of the space diverges, at any time; what is good lies at three edges at once."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate = unit(math.log10(hparams["lr"]), -6, 0)
        beta, size = hparams["beta"], unit(math.log2(hparams["batch"]), 3, 10)
        smooth, precise = hparams["epsilon"], hparams["precision"] == "full"
        edges = (
            0.75 + 0.15 * size - rate,
            0.9 - beta * (1 - 0.2 * size),
            smooth + (0.3 if precise else 0.1),
        )
        slack = min(edges)
        end = 0.1 + 0.5 * max(edges[0], 0) ** 1.2 + 0.2 * max(edges[1], 0) + 0.1 * smooth
        end += 0.08 if precise else 0.0
        values = end + 0.9 * _T ** -(0.25 + 0.5 * rate + 0.2 * beta)
        if slack < 0.03:
            values[int(max(0.0, 25 + 150 * (slack - 0.03))) :] = math.nan
        return np.asarray(values, dtype=float)

    space: dict[str, Any] = {"lr": log(-6, 0), "beta": double(0, 1), "batch": whole(8, 1024)}
    space |= {"epsilon": double(0, 1), "precision": choice("full", "half")}
    return Objective("edges", space, curve, steady(0.01))


def nested() -> Objective:
    """Conditions in two levels, eleven leaves of all kinds."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate = unit(math.log10(hparams["lr"]), -5, 0)
        end = 0.15 + 0.4 * (rate - 0.55) ** 2 + 0.01 * abs(hparams["layers"] - 7)
        speed = 0.4 + 0.4 * rate
        if hparams["schedule"] == "cosine":
            end += 0.1 * (hparams["cycle"] - 0.7) ** 2
            speed -= 0.1
        elif hparams["schedule"] == "step":
            end += 0.03 + 0.1 * (unit(math.log10(hparams["gamma"]), -2, 0) - 0.5) ** 2
        else:
            end += 0.1
        if hparams["regular"] == "on":
            kind = hparams["penalty"]
            strength = unit(math.log10(hparams["strength"]), -6, 0)
            wanted = {"l1": 0.3, "l2": 0.5, "path": 0.8}[kind]
            end += {"l1": 0.02, "l2": 0.0, "path": -0.04}[kind] + 0.5 * (strength - wanted) ** 2
            if kind == "path":
                end += 0.1 * (hparams["rate"] - 0.25) ** 2
                speed -= 0.2
        else:
            end += 0.07
            speed += 0.15
        return np.asarray(end + 0.9 * _T ** -max(speed, 0.1), dtype=float)

    space: dict[str, Any] = {
        "lr": log(-5, 0),
        "layers": whole(1, 12),
        "schedule": choice("flat", "cosine", "step"),
        "cycle": double(0, 1) | {"when": {"schedule": "cosine"}},
        "gamma": log(-2, 0) | {"when": {"schedule": "step"}},
        "regular": choice("off", "on"),
        "penalty": choice("l1", "l2", "path") | {"when": {"regular": "on"}},
        "strength": log(-6, 0) | {"when": {"regular": "on"}},
        "rate": double(0, 1) | {"when": {"penalty": "path"}},
    }
    return Objective("nested conditions", space, curve, steady(0.008))


def overfitting() -> Objective:
    """Fast learners overfit: the loss falls and rises again; only its last value counts."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, size = unit(math.log10(hparams["lr"]), -4, -0.5), unit(hparams["units"], 16, 512)
        drop, decay = hparams["dropout"] / 0.8, unit(math.log10(hparams["decay"]), -6, -1)
        bias = 0.2 + 0.3 * (1 - size) ** 2 + 0.2 * drop**2 + 0.4 * (rate - 0.6) ** 2
        bias += 0.2 * decay**2
        rises = max(0.5 * rate + 0.4 * size - 0.45 * drop - 0.35 * decay, 0.0)
        speed = 0.5 + 0.8 * rate - 0.3 * drop
        return np.asarray(bias + 0.9 * _T**-speed + rises * (_T / EPOCHS) ** 1.5, dtype=float)

    space = {"lr": log(-4, -0.5), "units": whole(16, 512), "dropout": double(0, 0.8)}
    space["decay"] = log(-6, -1)
    return Objective("overfitting", space, curve, steady(0.01), True)


def honest() -> Objective:
    """Eight dimensions that go together in pairs; short trainings tell the truth."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = [hparams[f"x{i}"] for i in range(8)]
        end = sum((x[i] - 0.2 - 0.1 * i) ** 2 for i in range(6))
        end += sum(0.8 * (x[i] + x[i + 1] - 0.5 - 0.2 * i) ** 2 for i in range(0, 6, 2))
        end += 0.2 * abs(x[6] - 0.5) + 0.05 * x[7]
        return np.asarray(0.1 + end * (1 + 0.4 * _T**-0.5) + 0.5 * _T**-0.8, dtype=float)

    return Objective("honest", {f"x{i}": double(0, 1) for i in range(8)}, curve, steady(0.02))


def elsewhere() -> Objective:
    """The optimum lies elsewhere for all but the last sixth of a training; five dimensions."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(4)] + [hparams["n"] / 30])
        late = 1 / (1 + np.exp(-(_T - 24) / 0.7))  # (EPOCHS,)
        first = 0.3 + float(((x - np.array([0.75, 0.2, 0.6, 0.3, 0.8])) ** 2).sum())
        last = float(((x - np.array([0.25, 0.6, 0.8, 0.5, 0.35])) ** 2).sum())
        return np.asarray(first * (1 - late) + last * late + 0.5 * _T**-0.6, dtype=float)

    space: dict[str, Any] = {f"x{i}": double(0, 1) for i in range(4)} | {"n": whole(0, 30)}
    return Objective("elsewhere", space, curve, steady(0.01), True)
