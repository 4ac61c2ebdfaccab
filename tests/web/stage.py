"""Server with a simulated agent: many trials with chosen metrics."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.helpers import Server, checkpoint, metrics
from tests.server.processes import LiveServer
from tests.server.processes import played as playing

TRIALS = 52
"""Of the sweep: more than a chart shows."""

LONG_STEPS = 20_000
LINES = 1500
ERROR = "rank 1 exited with code 1: ValueError: " + "a text that goes on and on " * 20

LEARNING_RATES = {"type": "categorical", "vals": [round(0.01 * n, 2) for n in range(1, TRIALS + 1)]}


@dataclass
class Stage:
    """Experiments of the server, and its client."""

    server: LiveServer
    played: Server
    sweep: int
    long: int
    waiting: int
    empty: int
    failed: int

    @property
    def url(self) -> str:
        return self.server.url

    def login_link(self) -> str:
        return self.url + str(self.played.post("/login-links")["url"])

    def trials(self, experiment_id: int) -> list[int]:
        """Return the ids of an experiment's trials, oldest first."""
        return [trial["id"] for trial in self.played.trials(experiment_id)]

    def best(self, count: int) -> list[int]:
        """Return the ids of the best trials of the sweep, best first."""
        ordered = sorted(self.played.trials(self.sweep), key=lambda trial: trial["best_validation"])
        return [trial["id"] for trial in ordered[:count]]


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """Start the server and run its experiments."""
    with playing(folder) as (server, played):
        played.add_agent(TRIALS)
        yield Stage(server, played, *(submit(played) for submit in EXPERIMENTS))


def _sweep(played: Server) -> int:
    """Submit trials of equal length with different losses."""
    searcher = {"name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": TRIALS}
    hparams = {"deepspeed_config": "ds_config.json", "optimizer": {"lr": LEARNING_RATES}}
    experiment_id = int(
        played.submit(name="sweep", searcher=searcher, hyperparameters=hparams)["id"]
    )
    for position, item in enumerate(played.wait_for_runs(TRIALS)):
        final = 1 + (position * 7 % TRIALS) / TRIALS
        records = [
            metrics("training", step, loss=final + 1 / step, loss_scale=65536.0, skipped_steps=0.0)
            for step in range(1, 21)
        ]
        played.post(f"/runs/{item.run_id}/started", {})
        played.send(item.run_id, 1, [*records, metrics("validation", 20, loss=final)])
        if position == TRIALS - 1:
            played.exit(item.run_id, 64, "rank 0 exited with code 64: impossible")
        else:
            played.exit(item.run_id, 0)
    return experiment_id


def _long(played: Server) -> int:
    """Submit a trial with more points than a chart, some of them zero or negative."""
    hparams = {"deepspeed_config": "ds_config.json", "rate": 1e-7, "word": "yes", "text": "a: b"}
    experiment_id = int(played.submit(name="long", hyperparameters=hparams)["id"])
    (item,) = played.wait_for_runs(1)
    played.post(f"/runs/{item.run_id}/started", {})
    for start in range(1, LONG_STEPS, 1000):
        played.send(item.run_id, start, [_point(step) for step in range(start, start + 1000)])
    last = [metrics("validation", LONG_STEPS, loss=0.2), checkpoint(LONG_STEPS, "long")]
    played.send(item.run_id, LONG_STEPS + 1, last)
    played.exit(item.run_id, 0)
    return experiment_id


def _point(step: int) -> Any:
    return metrics(
        "training",
        step,
        falling=0.2 * 5 ** (1 - step / LONG_STEPS),  # from 1 to 0.2
        wave=math.sin(step / 1000),
        depth=-float(step),
        spiky=100.0 if step == LONG_STEPS // 2 else step % 2,  # alternates between 0 and 1
    )


def _waiting(played: Server) -> int:
    """Submit an experiment that needs more slots than exist."""
    resources = {"slots_per_trial": 2 * TRIALS}
    script = {"entrypoint": "python3 model_def.py", "hyperparameters": {}}
    return int(played.submit(name="too wide", resources=resources, **script)["id"])


def _empty(played: Server) -> int:
    """Submit an experiment that completes without a validation."""
    experiment_id = int(played.submit(name="empty")["id"])
    (item,) = played.wait_for_runs(1)
    played.post(f"/runs/{item.run_id}/started", {})
    played.send(item.run_id, 1, [metrics("training", 1, loss=1.0)])
    played.exit(item.run_id, 0)
    return experiment_id


def _failed(played: Server) -> int:
    """Submit an experiment whose second rank fails at its start, with a long log."""
    experiment_id = int(
        played.submit(name="failed", resources={"slots_per_trial": 2}, max_restarts=0)["id"]
    )
    (item,) = played.wait_for_runs(1)
    played.post(f"/runs/{item.run_id}/started", {})
    played.log(item.run_id, 0, *(f"line {number} of rank 0" for number in range(LINES)))
    played.log(item.run_id, LINES, "\x1b[31mred\x1b[0m words of rank 1", rank=1)
    played.exit(item.run_id, 1, ERROR)
    return experiment_id


EXPERIMENTS = (_sweep, _long, _waiting, _empty, _failed)
