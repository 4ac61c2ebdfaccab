"""Objectives in closed form."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)
_PART = np.log(_T) / math.log(EPOCHS)  # 0 after one epoch, 1 at full length

LINEAR: Curve = (_T - 1) / (EPOCHS - 1)
"""A part that grows as the length does, so that even a third of it misleads."""

_HARTMANN = {
    3: (
        [[3, 10, 30], [0.1, 10, 35], [3, 10, 30], [0.1, 10, 35]],
        [[3689, 1170, 2673], [4699, 4387, 7470], [1091, 8732, 5547], [381, 5743, 8828]],
        -3.86278,
    ),
    6: (
        [
            [10, 3, 17, 3.5, 1.7, 8],
            [0.05, 10, 17, 0.1, 8, 14],
            [3, 3.5, 1.7, 10, 17, 8],
            [17, 8, 0.05, 10, 0.1, 14],
        ],
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ],
        -3.32237,
    ),
}  # fmt: skip


def double(low: float, high: float) -> dict[str, Any]:
    return {"type": "double", "minval": low, "maxval": high}


def log(low: float, high: float) -> dict[str, Any]:
    return {"type": "log", "base": 10, "minval": low, "maxval": high}


def whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "int", "minval": low, "maxval": high}


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


def steady(spread: float) -> Callable[[Random, int], float]:
    """The same noise after every epoch."""
    return lambda rng, _epoch: rng.gauss(0, spread)


def unit(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low)


def hartmann(dims: int, quality: str, bias: float, noise: float, part: Curve = _PART) -> Objective:
    """Hartmann's function with the fidelities of mf-prior-bench: bias and noise of short runs."""
    a, p, minimum = _HARTMANN[dims]
    matrix, centres = np.array(a, dtype=float), np.array(p) * 1e-4
    alpha = np.array([1.0, 1.2, 3.0, 3.2])[:, None] - bias * (1 - part)  # (4, EPOCHS)

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(dims)])
        bumps = np.exp(-(matrix * (x - centres) ** 2).sum(axis=1))  # (4,)
        return -(bumps[:, None] * alpha).sum(axis=0)

    def heard(rng: Random, epoch: int) -> float:
        return abs(rng.gauss(0, 1)) * noise * (1 - float(part[epoch - 1]))

    space = {f"x{i}": double(0, 1) for i in range(dims)}
    return Objective(f"hartmann{dims} {quality}", space, curve, heard, True, minimum)


def short_sighted() -> Objective:
    """Curves that end low begin high: the ranking is reversed for two thirds of a training."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, clip = (
            unit(math.log10(hparams["lr"]), -5, -1),
            unit(math.log10(hparams["clip"]), -2, 1),
        )
        warm = hparams["warmup"] / 10
        off = (rate - 0.3) ** 2 + 0.4 * (clip - 0.6) ** 2 + 0.4 * (warm - 0.8) ** 2
        off += 0.3 * (hparams["smooth"] - 0.15) ** 2 * (1 + rate)
        end = 0.2 + 1.2 * off
        late = 1 / (1 + np.exp((_T - 11 - 6 * warm) / 2.5))
        start: Curve = 2.2 - 0.9 * rate - 0.4 * clip + 0.5 * warm
        return end + (start - end) * late

    space = {"lr": log(-5, -1), "clip": log(-2, 1), "warmup": whole(0, 10)}
    space["smooth"] = double(0, 0.5)
    return Objective("short-sighted", space, curve, steady(0.01))


def branin() -> Objective:
    """Branin's function with coefficients that are off in short runs."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x, y, off = hparams["x"], hparams["y"], 1 - _PART
        b, c = 5.1 / (4 * math.pi**2) - 0.01 * off, 5 / math.pi - 0.1 * off
        r, s, t = 6 - 2 * off, 10 - 3 * off, 1 / (8 * math.pi) + 0.05 * off
        value: Curve = (y - b * x**2 + c * x - r) ** 2 + s * (1 - t) * math.cos(x) + s
        return value

    space = {"x": double(-5, 10), "y": double(0, 15)}
    return Objective("branin", space, curve, steady(0.05), True, 0.397887)


def power_laws() -> Objective:
    """Curves a + b t^-c: what is good early is mostly good late."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate = unit(math.log10(hparams["lr"]), -5, 0)
        width, decay = unit(hparams["width"], 16, 256), unit(math.log10(hparams["decay"]), -6, -1)
        drop = hparams["dropout"] / 0.7
        ideal = 0.62 - 0.2 * width
        end = 0.08 + 0.9 * (rate - ideal) ** 2 + 0.1 * (decay - 0.5 - 0.3 * (width - 0.5)) ** 2
        end += 0.12 * (drop - 0.6 * width) ** 2 + 0.05 * (1 - width)
        speed = 0.35 + 0.8 * rate * (1 - 0.4 * drop)
        return end + 0.9 * _T**-speed

    space = {"lr": log(-5, 0), "width": whole(16, 256), "decay": log(-6, -1)}
    space["dropout"] = double(0, 0.7)
    return Objective("power laws", space, curve, steady(0.01))


def crossing() -> Objective:
    """Power laws that cross: what learns fast ends high, and too fast diverges."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, momentum = unit(math.log10(hparams["lr"]), -4, 0.5), hparams["momentum"]
        size, kind = unit(hparams["layers"], 1, 8), hparams["schedule"]
        heat = rate + 0.25 * momentum
        slow = {"cosine": 0.0, "step": 0.04, "flat": 0.1}[kind]
        end = 0.1 + 0.5 * max(rate - 0.45 + 0.2 * size, 0) + 0.6 * max(0.4 - rate, 0) ** 2
        end += 0.1 * (momentum - 0.8) ** 2 + 0.15 * (size - 0.7) ** 2 + slow
        speed = 0.25 + 0.9 * rate + 0.2 * momentum - 0.2 * size + (0.15 if kind == "flat" else 0.0)
        values: Curve = end + 1.2 * _T ** -max(speed, 0.1)
        limit = 1.02 - 0.25 * size
        if heat > limit:
            values[int(max(0, 14 * (1 - 4 * (heat - limit)))) :] = math.nan
        return values

    space = {"lr": log(-4, 0.5), "momentum": double(0, 0.99), "layers": whole(1, 8)}
    space["schedule"] = choice("cosine", "step", "flat")
    return Objective("crossing, divergence", space, curve, steady(0.01))


def ackley() -> Objective:
    """Ackley's function in five dimensions, approached from above: many local hollows."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(5)]) - 0.3
        far, waves = math.sqrt(float((x**2).mean())), float(np.cos(2 * math.pi * 3 * x).mean())
        end = 20 + math.e - 20 * math.exp(-2 * far) - math.exp(waves)
        return end + 6 * (_T**-0.7 - EPOCHS**-0.7) * (1 + 0.3 * math.sin(9 * float(x.sum())))

    space = {f"x{i}": double(-1, 1) for i in range(5)}
    return Objective("ackley5", space, curve, steady(0.05), False, 0.0)


def rosenbrock() -> Objective:
    """A bent valley in four dimensions with two choices that shift it; fidelity adds a tilt."""

    def curve(hparams: dict[str, Any]) -> Curve:
        shift = {"a": 0.0, "b": 0.25, "c": -0.25, "d": 0.5}[hparams["kind"]]
        x = [hparams[f"x{i}"] for i in range(3)] + [hparams["n"] / 10]
        value = sum(8 * (x[i + 1] - x[i] ** 2) ** 2 + (0.8 + shift - x[i]) ** 2 for i in range(3))
        value = math.log1p(value + (0.3 if hparams["norm"] else 0.0) + abs(shift))
        tilt = 0.5 * (x[0] + x[2])
        off: Curve = (1 - _PART) * tilt + 0.8 * _T**-0.6
        return value + off

    space: dict[str, Any] = {f"x{i}": double(-1.5, 1.5) for i in range(3)}
    space |= {"n": whole(-15, 15), "kind": choice("a", "b", "c", "d"), "norm": choice(True, False)}
    return Objective("mixed valley", space, curve, steady(0.02), True)
