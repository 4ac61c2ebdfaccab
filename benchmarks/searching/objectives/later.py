"""Six more on which no variant was chosen, of kinds that none of the others is.

Dimensions that go together in all directions, a narrow hollow beside a wide one, warm restarts,
a metric in few steps whose values tie, trainings that collapse, and a race that is decided early.
They were written before the choice that ``docs/contribute/searcher_method.md`` describes, and run
after it.
"""

import math
from random import Random
from typing import Any

import numpy as np

from benchmarks.searching.objective import EPOCHS, Curve, Objective
from benchmarks.searching.objectives.functions import choice, double, log, steady, unit, whole

_T = np.arange(1, EPOCHS + 1, dtype=float)  # (EPOCHS,)


def coupled() -> Objective:
    """A hollow that is long in some directions and narrow in others, none of them along an axis."""
    rng = np.random.default_rng(6)
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]  # (6, 6)
    steep = np.geomspace(0.3, 10, 6)
    centre = np.array([0.35, 0.6, 0.45, 0.7, 0.3, 0.55])

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array([hparams[f"x{i}"] for i in range(6)])
        off = turn @ (x - centre)
        end = math.log1p(float((steep * off**2).sum()))
        early = 0.4 * float(off[0] + off[3])
        return np.asarray(0.1 + end + early * _T**-0.6 + 0.6 * _T**-0.8, dtype=float)

    return Objective("coupled", {f"x{i}": double(0, 1) for i in range(6)}, curve, steady(0.01))


def two_hollows() -> Objective:
    """A wide hollow that trains fast, and a narrow one, far off, that ends lower."""

    def curve(hparams: dict[str, Any]) -> Curve:
        x = np.array(
            [unit(math.log10(hparams["lr"]), -6, 0)] + [hparams[f"x{i}"] for i in range(3)]
        )
        wide = float(((x - np.array([0.7, 0.7, 0.6, 0.65])) ** 2).sum())
        narrow = float(((x - np.array([0.25, 0.3, 0.2, 0.35])) ** 2).sum())
        fast = 0.35 + 0.4 * wide + 0.7 * _T**-0.9
        slow = 0.12 + 3.0 * narrow + 0.9 * _T**-0.5
        return np.asarray(-0.05 * np.logaddexp(-fast / 0.05, -slow / 0.05), dtype=float)

    space = {"lr": log(-6, 0)} | {f"x{i}": double(0, 1) for i in range(3)}
    return Objective("two hollows", space, curve, steady(0.01))


def restarts() -> Objective:
    """Warm restarts: the rate falls and jumps back, so that a length finds trials at any phase."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, cycle = unit(math.log10(hparams["lr"]), -4, 0), hparams["cycle"]
        low, decay = hparams["floor"], unit(math.log10(hparams["decay"]), -5, -1)
        phase = ((_T - 1) % cycle + 1) / cycle  # (EPOCHS,): 1 at the end of a cycle
        heat = rate * (low + (1 - low) * (1 + np.cos(math.pi * phase)) / 2)
        end = 0.1 + 0.6 * (rate - 0.65) ** 2 + 0.2 * (decay - 0.45) ** 2
        end += 0.002 * abs(cycle - 9)
        return np.asarray(end + 0.5 * heat + 0.8 * _T ** -(0.3 + 0.6 * rate), dtype=float)

    space = {"lr": log(-4, 0), "cycle": whole(2, 14), "floor": double(0, 0.5)}
    space["decay"] = log(-5, -1)
    return Objective("restarts", space, curve, steady(0.01))


def ticks() -> Objective:
    """Whole numbers only, and an error in steps of a fiftieth: many values are the same."""

    def curve(hparams: dict[str, Any]) -> Curve:
        depth, width = unit(hparams["depth"], 1, 20), unit(hparams["width"], 1, 64)
        heads, size = unit(hparams["heads"], 1, 8), unit(hparams["patch"], 2, 16)
        ahead = unit(hparams["warmup"], 0, 20)
        end = 0.06 + 0.6 * (depth - 0.3 - 0.4 * width) ** 2 + 0.3 * (size - 0.25) ** 2
        end += 0.15 * (1 - width) + 0.2 * (heads - 0.6) ** 2 + 0.1 * (ahead - 0.4) ** 2
        falls = 0.9 * np.exp(-_T / (2 + 6 * depth + 4 * ahead))
        return np.asarray(np.ceil(50 * np.minimum(end + falls, 0.9)) / 50, dtype=float)

    space = {"depth": whole(1, 20), "width": whole(1, 64), "heads": whole(1, 8)}
    space |= {"patch": whole(2, 16), "warmup": whole(0, 20)}
    return Objective("ticks", space, curve, lambda _rng, _epoch: 0.0)


def collapse() -> Objective:
    """Trainings that get better until they collapse, and noise that grows as they go on."""

    def curve(hparams: dict[str, Any]) -> Curve:
        rate, clip = unit(math.log10(hparams["lr"]), -5, -2), hparams["clip"]
        entropy, discount = unit(math.log10(hparams["entropy"]), -4, 0), hparams["discount"]
        reached = 1 - 0.8 * (rate - 0.7) ** 2 - 0.5 * (discount - 0.6) ** 2
        reached -= 0.3 * (entropy - 0.4) ** 2
        grown = reached * (1 - np.exp(-_T * (0.05 + 0.2 * rate)))
        lasts = 40 * (1.15 - rate) * (0.5 + 0.5 * (1 - clip) + 0.6 * entropy)
        return np.asarray(1 - grown + 0.6 / (1 + np.exp(-(_T - lasts))), dtype=float)

    def heard(rng: Random, epoch: int) -> float:
        return rng.gauss(0, 0.01 + 0.03 * epoch / EPOCHS)

    space = {"lr": log(-5, -2), "clip": double(0, 1), "entropy": log(-4, 0)}
    space["discount"] = double(0, 1)
    return Objective("collapse", space, curve, heard, True)


def early_decided() -> Objective:
    """All is decided after three epochs; one choice of sixteen, and conditional settings."""
    rng = Random("early decided")
    base = {f"m{i}": rng.random() * 0.5 for i in range(16)}

    def curve(hparams: dict[str, Any]) -> Curve:
        model, rate = hparams["model"], unit(math.log10(hparams["lr"]), -5, -1)
        tuned = hparams["tune"]
        end = 0.1 + base[model] + 0.5 * (rate - 0.4 - base[model] / 2) ** 2
        if tuned == "head":
            end += 0.12 + 0.05 * (hparams["dropout"] - 0.5) ** 2
        elif tuned == "adapter":
            end += 0.03 + 0.3 * (unit(math.log2(hparams["rank"]), 0, 8) - 0.5) ** 2
        else:
            end += 0.4 * max(rate - 0.5, 0) + 0.1 * (hparams["layerwise"] - 0.8) ** 2
        return np.asarray(end + 0.5 * np.exp(-_T), dtype=float)

    space: dict[str, Any] = {"model": choice(*base), "lr": log(-5, -1)}
    space["tune"] = choice("head", "adapter", "all")
    space["dropout"] = double(0, 1) | {"when": {"tune": "head"}}
    space["rank"] = whole(1, 256) | {"when": {"tune": "adapter"}}
    space["layerwise"] = double(0.5, 1) | {"when": {"tune": "all"}}
    return Objective("early decided", space, curve, steady(0.008))
