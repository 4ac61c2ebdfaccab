"""The methods that are compared; each drives a searcher class."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.searching import peers, syne
from benchmarks.searching.objective import EPOCHS
from zerolab.searcher import Searcher, make_searcher

Make = Callable[[Mapping[str, Any], int], Searcher]

_LENGTH = {"max_length": {"epochs": EPOCHS}}


def _ours(**block: Any) -> Make:
    config = {"metric": "loss", "max_concurrent_trials": peers.WORKERS, **block}
    return lambda space, seed: make_searcher(config, space, seed)


def _optuna(sampler: str, pruner: str) -> Make:
    return lambda space, seed: peers.OptunaSearcher(space, seed, sampler, pruner)


def _syne(kind: str) -> Make:
    return lambda space, seed: syne.SyneTuneSearcher(space, seed, kind)


_MANY = {"max_trials": 5000, **_LENGTH}
_HALVING = {**_MANY, "divisor": 3}

METHODS: dict[str, Make] = {
    "random": _ours(name="random", **_MANY),
    "tpe_asha": _ours(name="tpe_asha", **_MANY),
    "asha stopping": _ours(name="async_halving", num_rungs=4, **_HALVING),
    "asha promoting": _ours(name="async_halving", num_rungs=4, stop_once=False, **_HALVING),
    "adaptive_asha": _ours(name="adaptive_asha", max_rungs=4, **_HALVING),
    # one population, which is done after about five full trainings of eight workers
    "pbt": _ours(name="pbt", population_size=40, num_rounds=9, length_per_round={"epochs": 3}),
    "pasha": peers.Pasha,
    "optuna tpe": _optuna("tpe", "none"),
    "optuna tpe + hyperband": _optuna("tpe", "hyperband"),
    "optuna tpe + halving": _optuna("tpe", "halving"),
    "optuna cma-es": _optuna("cmaes", "none"),
}
if syne.is_installed():
    METHODS["syne tune ashabore"] = _syne("ASHABORE")
    METHODS["syne tune ashacqr"] = _syne("ASHACQR")
