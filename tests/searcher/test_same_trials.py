"""The same seed gives the same trials: on any machine, in any process, however the file is ordered.

What every searcher draws is written down in ``same_trials.json``. Whoever changes it on purpose
changes the trials of every experiment that is repeated, and says so in the changelog: the output of
``python -m tests.searcher.test_same_trials`` is the new table.
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
    """Play a search whose trials take turns; what a trial tells follows from what it was given.

    Args:
        name: Of :data:`SEARCHERS`.
        space: The block ``hyperparameters`` of a file.
    """
    length = {} if name == "pbt" else {"max_length": LENGTH}
    bound = {"max_concurrent_trials": CONCURRENT}
    block = {**SEARCHERS[name], "metric": "loss", **length, **bound}
    if name == "pbt":
        block["length_per_round"] = 9
    searcher = make_searcher(block, space, 7)
    made: dict[int, Create] = {}
    until: dict[int, float] = {}
    trained: dict[int, float] = {}
    told: list[Operation] = [*searcher.initial_operations()]
    stopped: set[int] = set()
    open_ids: list[int] = []
    while True:
        for each in told:
            if isinstance(each, Create):
                made[each.trial_id], trained[each.trial_id] = each, 0
                open_ids.append(each.trial_id)
            elif isinstance(each, Continue):
                until[each.trial_id] = each.until
            elif isinstance(each, Stop):
                stopped.add(each.trial_id)
        turn = next((i for i in open_ids if i in stopped or _goes_on(i, until, trained)), None)
        if turn is None:
            return [
                {"id": i, "trial_seed": each.trial_seed, "from": each.source, **each.hparams}
                for i, each in made.items()
            ]
        open_ids.remove(turn)
        if turn in stopped or trained[turn] >= LENGTH:
            told = searcher.trial_exited(turn)
            continue
        open_ids.append(turn)
        trained[turn] += 1
        told = searcher.validation_completed(turn, _loss(made[turn].hparams), trained[turn])


def _goes_on(trial_id: int, until: dict[int, float], trained: dict[int, float]) -> bool:
    return trained[trial_id] >= LENGTH or trained[trial_id] < until.get(trial_id, LENGTH)


def _loss(hparams: Any) -> float:
    """So coarse that the last digit of a hyperparameter does not show in it."""
    return round(hparams["layers"][0]["drop"] + abs(hparams["layers"][0]["width"] - 300) / 300, 6)


def _turned(value: Any) -> Any:
    """The same block, with its keys the other way round."""
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    return [_turned(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_seed_gives_the_trials_that_were_written_down_however_the_file_is_ordered(
    name: str,
) -> None:
    expected = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    space = yaml.safe_load(SPACE)
    assert trials_of(name, space) == expected
    assert trials_of(name, _turned(space)) == expected


@pytest.mark.processes
def test_a_seed_gives_the_same_trials_in_another_process() -> None:
    other = {
        "PYTHONHASHSEED": "1",
        # Where it is glibc, logarithms and cosines of older processors: other last digits.
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4",
        # And sums of matrices in another order.
        "OPENBLAS_CORETYPE": "Prescott",
    }
    told = subprocess.run(
        [sys.executable, "-m", "tests.searcher.test_same_trials"],
        env={**os.environ, **other}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout == TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["tpe_asha", "pbt"])
@pytest.mark.parametrize("way", [-math.inf, math.inf])
def test_the_last_digits_of_another_machines_mathematics_change_no_trial(
    name: str, way: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shaken(function: Any) -> Any:
        return lambda x: np.nextafter(function(x), way)[()]

    for module, function in ((math, "log"), (math, "cos"), (np, "log"), (np, "exp")):
        monkeypatch.setattr(module, function, shaken(getattr(module, function)))
    expected = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    assert trials_of(name, yaml.safe_load(SPACE)) == expected


def printed() -> str:
    """Every searcher's trials, one a line."""
    space = yaml.safe_load(SPACE)
    lines = [f'"{name}": [\n{_rows(trials_of(name, space))}\n]' for name in SEARCHERS]
    return "{" + ",\n".join(lines) + "}\n"


def _rows(trials: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(trial) for trial in trials)


if __name__ == "__main__":
    sys.stdout.write(printed())
