"""Reproducibility: the same seed gives the same trials on any machine, for any order of keys.

``same_trials.json`` records the trials of every searcher. A change of that file changes the trials
of every repeated experiment, and needs a changelog entry. ``python -m
tests.searcher.test_same_trials`` prints the new table.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from zerolab.searcher import Continue, Create, Operation, Stop, make_searcher

TABLE = Path(__file__).with_name("same_trials.json")
LENGTH = 27
CONCURRENT = 4

SPACE = """
lr: {type: log, minval: -5, maxval: -1}
decay: {type: log, base: 2, minval: -3.5, maxval: 4}
fixed: {type: const, val: {a: 1, b: [2, 3]}}
optimizer:
  name: {type: categorical, vals: [sgd, adam, [1, 2]]}
  momentum: {type: double, minval: 0, maxval: 0.99, when: {optimizer.name: sgd}}
  betas:
    - {type: double, minval: 0.8, maxval: 0.95, when: {optimizer.name: adam}}
    - 0.999
layers:
  - {width: {type: int, minval: 16, maxval: 512}, drop: {type: double, minval: 0, maxval: 0.5}}
  - {width: {type: int, minval: 1, maxval: 3}}
"""

SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {"name": "random", "max_trials": 6},
    "stopping": {"name": "async_halving", "num_rungs": 3, "divisor": 3, "max_trials": 9},
    "promoting": {
        "name": "async_halving", "num_rungs": 3, "divisor": 3, "max_trials": 9, "stop_once": False,
    },
    "adaptive": {"name": "adaptive_asha", "divisor": 3, "max_trials": 9},
    "tpe_asha": {"name": "tpe_asha", "max_trials": 40},
    "pbt": {
        "name": "pbt", "population_size": 6, "num_rounds": 3,
        "replace_function": {"truncate_fraction": 0.34},
    },
}  # fmt: skip


def trials_of(name: str, space: Any) -> list[dict[str, Any]]:
    """Run a search whose trials take turns; each reports a function of its hyperparameters.

    Args:
        name: Key of :data:`SEARCHERS`.
        space: The ``hyperparameters`` block of a file.
    """
    length = {} if name == "pbt" else {"max_length": LENGTH}
    bound = {"max_concurrent_trials": CONCURRENT}
    block = {**SEARCHERS[name], "metric": "loss", **length, **bound}
    if name == "pbt":
        block["length_per_round"] = 9
    searcher = make_searcher(block, space, 7)
    created: dict[int, Create] = {}
    until: dict[int, float] = {}
    trained: dict[int, float] = {}
    operations: list[Operation] = [*searcher.initial_operations()]
    stopped: set[int] = set()
    open_ids: list[int] = []
    while True:
        for operation in operations:
            if isinstance(operation, Create):
                created[operation.trial_id], trained[operation.trial_id] = operation, 0
                open_ids.append(operation.trial_id)
            elif isinstance(operation, Continue):
                until[operation.trial_id] = operation.until
            elif isinstance(operation, Stop):
                stopped.add(operation.trial_id)
        turn = next((i for i in open_ids if i in stopped or _can_train(i, until, trained)), None)
        if turn is None:
            return [
                {
                    "id": i,
                    "trial_seed": operation.trial_seed,
                    "from": operation.source,
                    **operation.hparams,
                }
                for i, operation in created.items()
            ]
        open_ids.remove(turn)
        if turn in stopped or trained[turn] >= LENGTH:
            operations = searcher.trial_exited(turn)
            continue
        open_ids.append(turn)
        trained[turn] += 1
        operations = searcher.validation_completed(
            turn, _loss(created[turn].hparams), trained[turn]
        )


def _can_train(trial_id: int, until: dict[int, float], trained: dict[int, float]) -> bool:
    return trained[trial_id] >= LENGTH or trained[trial_id] < until.get(trial_id, LENGTH)


def _loss(hparams: Any) -> float:
    """Return a loss so coarse that the last digit of a hyperparameter has no effect."""
    return round(hparams["layers"][0]["drop"] + abs(hparams["layers"][0]["width"] - 300) / 300, 6)


def _reversed_keys(value: Any) -> Any:
    """Return the same block with its keys in reverse order."""
    if isinstance(value, dict):
        return {key: _reversed_keys(value[key]) for key in reversed(value)}
    return [_reversed_keys(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", SEARCHERS)
def test_recorded_trials_are_reproduced(
    name: str,
) -> None:
    expected = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    space = yaml.safe_load(SPACE)
    assert trials_of(name, space) == expected
    assert trials_of(name, _reversed_keys(space)) == expected


@pytest.mark.processes
def test_same_trials_in_another_process() -> None:
    other = {
        "PYTHONHASHSEED": "1",
        # With glibc, logarithms and cosines of older processors: other last digits.
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
        # Also sums of matrices in another order.
        "OPENBLAS_CORETYPE": "Prescott",
    }
    completed = subprocess.run(
        [sys.executable, "-m", "tests.searcher.test_same_trials"],
        env={**os.environ, **other}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert completed.stdout == TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tpe_asha", "pbt"])
@pytest.mark.parametrize("way", [-math.inf, math.inf])
def test_trials_ignore_last_digits_of_math(
    name: str, way: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shaken(function: Any) -> Any:
        return lambda x: np.nextafter(function(x), way)[()]

    for module, function in ((math, "log"), (math, "cos"), (np, "log"), (np, "exp")):
        monkeypatch.setattr(module, function, shaken(getattr(module, function)))
    expected = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    assert trials_of(name, yaml.safe_load(SPACE)) == expected


def printed() -> str:
    """Return the trials of every searcher, one a line."""
    space = yaml.safe_load(SPACE)
    lines = [f'"{name}": [\n{_rows(trials_of(name, space))}\n]' for name in SEARCHERS]
    return "{" + ",\n".join(lines) + "}\n"


def _rows(trials: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(trial) for trial in trials)


if __name__ == "__main__":
    sys.stdout.write(printed())
