"""Objectives of further kinds.

An optimum that moves as training goes on, noise that is all there is to see at first, a learning
rate that pays only once it decays, losses that fall late and at once, a cliff beside the best
place, twenty dimensions of which four matter, and choices only.
"""

import math
from random import Random
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, unit, whole

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)
_LATE = 1 - (_T - 1) / (EPOCHS - 1)  # 1 after one epoch, 0 at full length


def moving() -> Objective:
    """Levy's function in four dimensions, whose optimum moves during training."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(4)])[:, None]  # (4, 1)
        towards = np.array([1.0, -0.7, 0.5, -1.0])[:, None]
        w = 1 + (x - 1 + 2.5 * towards * _LATE**2) / 4  # (4, EPOCHS)
        first = np.sin(math.pi * w[0]) ** 2
        middle = ((w[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * w[:-1] + 1) ** 2)).sum(axis=0)
        last = (w[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * w[-1]) ** 2)
        value: Curve = np.log1p(first + middle + last)
        return value

    space = {f"x{i}": double(-8, 8) for i in range(4)}
    return Objective("moving optimum", space, curve, steady(0.01), True, 0.0)


def noisy() -> Objective:
    """Michalewicz' function in five dimensions; short trainings say the same, but in noise."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = [hparams[f"x{i}"] for i in range(5)]
        value = -sum(math.sin(a) * math.sin((i + 1) * a**2 / math.pi) ** 4 for i, a in enumerate(x))
        return np.full(EPOCHS, value)

    def heard(rng: Random, epoch: int) -> float:
        return rng.gauss(0, 1) * 1.5 * float(_LATE[epoch - 1]) ** 2

    space = {f"x{i}": double(0, math.pi) for i in range(5)}
    return Objective("all noise at first", space, curve, heard, True, -4.687658)


def decaying() -> Objective:
    """The rate decays after two thirds: until then a high one looks bad, and ends best."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate = unit(math.log10(hparams["lr"]), -4, 0)
        width, decay = unit(hparams["width"], 8, 256), unit(math.log10(hparams["decay"]), -6, -1)
        smooth = hparams["smoothing"] / 0.3
        end = 0.15 + 0.7 * (rate - 0.7) ** 2 + 0.08 * (1 - width) + 0.15 * (decay - 0.6) ** 2
        end += 0.05 * (smooth - 0.4 * rate) ** 2
        jitter = 0.9 * max(rate - 0.2, 0.0)  # what a high rate costs until it decays
        drop = 1 / (1 + np.exp((_T - 18) / 0.7))
        values: Curve = end + jitter * drop + 0.8 * _T ** -(0.4 + 0.5 * rate)
        return values

    space = {"lr": log(-4, 0), "width": whole(8, 256), "decay": log(-6, -1)}
    space["smoothing"] = double(0, 0.3)
    return Objective("decaying rate", space, curve, steady(0.01))


def sudden() -> Objective:
    """Nothing happens for some time, and then all at once; what ends best begins late."""

    def curve(hparams: dict[str, Any]) -> Curve:
        decay = unit(math.log10(hparams["decay"]), -4, 0)
        rate = unit(math.log10(hparams["lr"]), -4, -1)
        part, depth = hparams["data"], unit(hparams["layers"], 1, 6)
        end = 0.05 + 0.8 * (rate - 0.55) ** 2 + 0.5 * (decay - 0.7) ** 2 + 0.3 * (part - 0.8) ** 2
        end += 0.15 * (depth - 0.4) ** 2
        begins = 3 + 12 * decay + 8 * (1 - rate) * (1 - part) + 2 * depth
        late: Curve = 1 / (1 + np.exp(-(_T - begins) / 0.8))
        return 1.2 - 0.05 * rate - (1.2 - min(end, 1.1)) * late

    space = {"decay": log(-4, 0), "lr": log(-4, -1), "layers": whole(1, 6)}
    space["data"] = double(0.2, 1)
    return Objective("sudden", space, curve, steady(0.01))


def cliff() -> Objective:
    """The best place lies beside a cliff; more than half of the space diverges, some of it late."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate = unit(math.log10(hparams["lr"]), -5, 1)
        momentum, clip = hparams["momentum"], unit(math.log10(hparams["clip"]), -2, 2)
        batch = {"32": 0.0, "128": 0.1, "512": 0.2}[hparams["batch"]]
        edge = 0.62 - 0.25 * momentum + batch - 0.15 * clip
        end = 0.1 + 1.1 * abs(edge - rate) ** 1.5 + 0.1 * (momentum - 0.7) ** 2
        end += 0.1 * (clip - 0.3) ** 2 + batch * 0.3
        values: Curve = end + 1.0 * _T ** -(0.3 + 0.7 * rate)
        if rate > edge:
            values[int(max(0.0, 24 - 200 * (rate - edge))) :] = math.nan
        return values

    space = {"lr": log(-5, 1), "momentum": double(0, 0.99), "clip": log(-2, 2)}
    space["batch"] = choice("32", "128", "512")
    return Objective("cliff", space, curve, steady(0.01))


def wide() -> Objective:
    """Twenty dimensions of which four matter, with power laws for curves."""
    wanted = [0.2, 0.75, 0.5, 0.9]

    def curve(hparams: dict[str, Any]) -> Curve:
        x = [hparams[f"x{i}"] for i in range(20)]
        off = [x[i] - wanted[i] for i in range(4)]
        end = 0.1 + sum(o**2 for o in off) + 0.8 * off[0] * off[1]
        end += 0.004 * sum((a - 0.5) ** 2 for a in x[4:])
        values: Curve = end + 0.7 * _T ** -(0.4 + 0.5 * x[2])
        return values

    space = {f"x{i}": double(0, 1) for i in range(20)}
    return Objective("four of twenty", space, curve, steady(0.01))


def choices() -> Objective:
    """Seven choices of four each that go together in pairs; short trainings see half of them."""
    rng = Random("choices")
    alone = [[rng.random() for _ in range(4)] for _ in range(7)]
    pairs = [[[rng.random() for _ in range(4)] for _ in range(4)] for _ in range(6)]

    def curve(hparams: dict[str, Any]) -> Curve:
        at = [hparams[f"c{i}"] for i in range(7)]
        early = sum(alone[i][at[i]] for i in range(7))
        late = sum(pairs[i][at[i]][at[i + 1]] for i in range(6))
        values: Curve = 0.3 * early + 0.7 * late * (1 - _LATE) + 0.5 * _T**-0.5
        return values

    space = {f"c{i}": choice(0, 1, 2, 3) for i in range(7)}
    return Objective("choices", space, curve, steady(0.02), True)
