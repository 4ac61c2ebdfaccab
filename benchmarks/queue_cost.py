"""Cost of a queue of empty trials: CPU time besides the trials' own work.

    python -m benchmarks.queue_cost [--trials 1000] [--slots 2] [--kinds command class]

An installation of its own is brought up in a temporary directory, and warm before the first trial.
A random search of so many trials is submitted and runs to its end. ``command`` is the entrypoint
``true``, which does nothing at all; ``class`` a trial class that trains one batch of one weight,
validates once and saves a checkpoint. What is told are CPU seconds a trial, user and system, of the
server, the agent, and of what the agent starts: the fork server, launchers and ranks; and how much
of it all is beyond the trial's own work. That is what the same costs bare: the program ``true``, or
the class under ``zerotrial.Trainer`` in a process that was forked from one with torch imported. The
goal: under 0.2 s beyond it. A table goes to stdout, and everything to
``benchmarks/results/queue_cost.json``.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.cli.model import ENGINE, MODEL, experiment
from tests.end_to_end.installation import ENDED, Installation
from zerolab.client.archive import pack

RESULTS = Path(__file__).resolve().parent / "results" / "queue_cost.json"
GOAL_S = 0.2
WARM_UP_S = 15.0
LOOK_S = 0.5
BARE_RUNS = 30

KINDS: dict[str, dict[str, Any]] = {
    "command": {"entrypoint": "true"},
    "class": {},
}
PARTS = ("server", "agent", "what it starts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, metavar="S")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = place / "model"
        model.mkdir()
        (model / "model_def.py").write_text(MODEL)
        with Installation.running(place / "home", slots=options.slots) as installation:
            time.sleep(options.warm_up)  # the fork server imports in the background
            results = {
                kind: measure(installation, model, config_of(kind, options.trials), options.trials)
                for kind in options.kinds
            }
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            for kind, found in results.items():
                found["own work"] = pool.apply(own_work, (kind, model))
    print(
        f"{options.trials} trials, {options.slots} slots; CPU ms a trial (goal {GOAL_S * 1e3:.0f}"
        " beyond its own work)"
    )
    columns = (*PARTS, "all", "own work", "beyond", "wall s")
    print(f"{'':10} " + " ".join(f"{column:>14}" for column in columns))
    for kind, found in results.items():
        total, own = sum(found[part] for part in PARTS), found["own work"]
        each = [*(found[part] for part in PARTS), total, own, total - own]
        cells = " ".join(f"{1e3 * value:14.1f}" for value in each)
        print(f"{kind:10} {cells} {found['wall_s']:14.1f} {found['states']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))
    return 0


def config_of(kind: str, trials: int) -> dict[str, Any]:
    """A random search of trials that do nothing."""
    config = experiment(1, **KINDS[kind])
    config["searcher"] |= {"name": "random", "max_trials": trials, "max_concurrent_trials": 0}
    config["hyperparameters"] = {
        **config["hyperparameters"],
        "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    }
    return config


def measure(
    installation: Installation, model: Path, config: dict[str, Any], trials: int
) -> dict[str, Any]:
    """Run it to its end and say what a trial took."""
    before, began = spent(installation), time.perf_counter()
    experiment_id = installation.client.create_experiment(config, pack(model))["id"]
    while installation.client.experiment(experiment_id)["state"] not in ENDED:
        time.sleep(LOOK_S)
    wall = time.perf_counter() - began
    after = spent(installation)
    states: dict[str, int] = {}
    for trial in installation.client.trials(experiment_id):
        states[trial["state"]] = states.get(trial["state"], 0) + 1
    each = {part: (after[part] - before[part]) / trials for part in PARTS}
    return {**each, "wall_s": wall, "states": states}


def own_work(kind: str, model: Path) -> float:
    """CPU seconds of the same trial without a platform, beyond those of an empty fork.

    Its process is forked from one that has imported what the fork server imports.
    """
    from zerotrial.process.launcher import TRIAL_CLASS_MODULES, import_next

    importlib.import_module("torch")
    waiting = list(TRIAL_CLASS_MODULES)
    while waiting:
        import_next(waiting)
    work = {"command": lambda: os.execvp("true", ["true"]), "class": lambda: train(model)}[kind]
    bare, empty = (
        statistics.median(of_child(each) for _ in range(BARE_RUNS)) for each in (work, lambda: None)
    )
    return max(bare - empty, 0.0)


def of_child(work: Callable[[], None]) -> float:
    """CPU seconds of a forked process that does this."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, status
    return usage.ru_utime + usage.ru_stime


def train(model: Path) -> None:
    """Train the class for one batch, validate, save a checkpoint."""
    import torch

    import zerotrial

    torch.set_num_threads(1)
    sys.path.insert(0, str(model))
    trial_class = importlib.import_module("model_def").Line
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        hparams = {"deepspeed_config": ENGINE, "lr": 0.01}
        with zerotrial.init(hparams=hparams, seed=1) as context:
            zerotrial.Trainer(trial_class(context), context).fit(max_length=zerotrial.Batch(1))


def spent(installation: Installation) -> dict[str, float]:
    """CPU seconds so far: those of ended children are with the parent that has waited for them."""
    found = dict.fromkeys(PARTS, 0.0)
    for process in installation.processes():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            own = times.user + times.system
            ended = times.children_user + times.children_system
            if process.pid == installation.server_pid:
                found["server"] += own + ended
            elif process.pid == installation.agent_pid:
                found["agent"] += own
                found["what it starts"] += ended
            else:
                found["what it starts"] += own + ended
    return found


if __name__ == "__main__":
    sys.exit(main())
