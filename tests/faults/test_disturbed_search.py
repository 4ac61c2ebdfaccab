"""Searches whose server, trials and agent are killed equal undisturbed ones.

The trials train two at a time, one on each slot. Two things make the comparison exact. Training
depends only on hyperparameters and checkpoint. Each run of a trial ends at a gate: when all running
trials wait at their gates, a rule opens one, and that trial reports and ends. So results reach the
searcher in a fixed order. Without gates the order would depend on timing, and a searcher that
learns from results could choose other trials.
"""

import itertools
import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.end_to_end.installation import Installation
from tests.waiting import until

SCRIPT = """
import json, pathlib, time
import zerolab.core

with zerolab.core.init() as context:
    info, ranks = context.info, context.distributed
    place = pathlib.Path(info.config["data"]["place"])
    hparams = context.train.get_hparams()
    x, v, start = [1.0, -0.7], [0.0, 0.0], 0
    if context.train.latest_checkpoint:
        with context.checkpoint.restore_path(context.train.latest_checkpoint.uuid) as path:
            x, v, start = json.loads((path / "state").read_text())
    until = context.train.until or 27
    name = f"{info.trial_id}-{until}"
    for step in range(start + 1, until + 1):
        if step == until and ranks.is_chief:
            (place / f"here-{name}-{info.run_id}").touch()
            while not (place / f"go-{name}").exists():
                time.sleep(0.01)
        if ranks.size == 2:  # each has one of the two gradients
            gradient = ranks.allgather((3.0, 1.0)[ranks.rank] * x[ranks.rank])
        else:
            gradient = [3.0 * x[0], x[1]]
        v = [hparams["momentum"] * a + b for a, b in zip(v, gradient)]
        x = [a - hparams["lr"] * b for a, b in zip(x, v)]
        if step == until:
            loss = 1.5 * x[0] ** 2 + 0.5 * x[1] ** 2
            context.train.report_validation_metrics(step, {"loss": loss})
        if ranks.is_chief and (step == until or step % 4 == 0):
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state").write_text(json.dumps([x, v, step]))
        ranks.barrier()
"""

TPE = {
    "name": "tpe_asha", "max_length": {"batches": 27}, "max_trials": 10,
    "max_concurrent_trials": 2,
}  # fmt: skip
TPE_DISTURBED = {2: "server", 4: "trial", 6: "agent", 8: "trial", 10: "server"}
"""Number of finished runs -> process to kill then."""

PROMOTING = {
    "name": "async_halving", "num_rungs": 3, "divisor": 3, "stop_once": False,
    "max_length": {"batches": 27}, "max_trials": 9, "max_concurrent_trials": 1,
}  # fmt: skip
PROMOTING_DISTURBED = {2: "server", 5: "trial", 8: "agent"}
"""Trials of this search have two ranks and use both slots."""


def config(gate_directory: Path, searcher: Mapping[str, Any]) -> dict[str, Any]:
    gate_directory.mkdir()
    return {
        "name": "disturbed",
        "entrypoint": "python train.py",
        "data": {"place": str(gate_directory)},
        "hyperparameters": {
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": 0},
            "momentum": {"type": "double", "minval": 0, "maxval": 0.95},
        },
        "searcher": {"metric": "loss", **searcher},
        "resources": {"slots_per_trial": 2 // searcher["max_concurrent_trials"]},
        "reproducibility": {"experiment_seed": 3},
    }  # fmt: skip


def rows(installation: Installation, query: str) -> list[Any]:
    """Query the database, which costs a tenth of a server request."""
    with closing(sqlite3.connect(installation.home.database)) as database:
        return database.execute(query).fetchall()


class Gates:
    """Gates that let the trials of a search finish one at a time, independent of timing.

    Args:
        installation: Installation whose experiment 1 is the search.
        gate_directory: Directory of the trials' marks and of the gates' files.
        disturbed: Number of finished runs -> process to kill then.
    """

    def __init__(
        self, installation: Installation, gate_directory: Path, disturbed: Mapping[int, str]
    ) -> None:
        self._installation = installation
        self._gate_directory = gate_directory
        self._disturbed = disturbed
        self.killed: Counter[int] = Counter()
        """Trial -> number of its killed ranks."""
        self.restarted: Counter[int] = Counter()
        """Trial -> number of its runs that died at a gate."""
        self.both_waiting = 0
        """Number of times that two trials waited at their gates."""

    def run(self) -> None:
        """Open one gate after another until no trial runs."""
        for finished in itertools.count():
            waiting = until(
                "all running trials wait at their gates",
                self._find_waiting,
                lambda result: result is not None,
                not_yet=sqlite3.OperationalError,
                details=lambda: "\n".join(self._installation.lines(1)[-30:]),
            )
            if not waiting:
                break
            self.both_waiting += len(waiting) == 2
            trial_id = Random(finished).choice(sorted(waiting))
            self._pass(trial_id, waiting, self._disturbed.get(finished, ""))

    def _find_waiting(self) -> dict[int, Path] | None:
        """Return the marks of all running trials; None while one has not reached its gate.

        The result is empty when the search has finished.
        """
        result = {}
        query = "SELECT id, run_id, state FROM trials WHERE state NOT IN ('PAUSED', 'COMPLETED')"
        for trial_id, run_id, state in rows(self._installation, query):
            marks = list(self._gate_directory.glob(f"here-{trial_id}-*-{run_id}"))
            if state != "RUNNING" or not marks or self._gate(marks[0]).exists():
                return None
            result[trial_id] = marks[0]
        if not result and rows(
            self._installation, "SELECT 1 FROM experiments WHERE state = 'ACTIVE'"
        ):
            return None
        return result

    def _gate(self, mark: Path) -> Path:
        return self._gate_directory / mark.name.rpartition("-")[0].replace("here", "go")

    def _pass(self, trial_id: int, waiting: Mapping[int, Path], killed: str) -> None:
        """Kill a process while all trials wait, and open the gate of one."""
        gate = self._gate(waiting[trial_id])
        runs = {trial: int(mark.name.rpartition("-")[2]) for trial, mark in waiting.items()}
        if killed == "server":
            self._installation.kill_server()
            gate.touch()  # it continues and ends while the server is down
            self._installation.up()
        elif killed == "agent":
            ranks = [
                pid for run in runs.values()
                for pid in self._installation.folder(run).rank_pids().values()
            ]  # fmt: skip
            self._installation.kill_agent()
            # Ranks die shortly after the agent; before the gate opens they must be gone.
            until("its ranks are dead", lambda: not any(map(psutil.pid_exists, ranks)))
            self.restarted.update(runs.keys())
            gate.touch()
            self._installation.up()
        elif killed == "trial":
            os.kill(self._installation.rank_pid(runs[trial_id]), signal.SIGKILL)
            self.killed[trial_id] += 1
            self.restarted[trial_id] += 1
            gate.touch()
        else:
            gate.touch()


def search(
    directory: Path, searcher: Mapping[str, Any], disturbed: Mapping[int, str]
) -> tuple[dict[str, Any], Gates]:
    """Run a search with disturbances; return its result and its gates."""
    directory.mkdir()
    gate_directory = directory / "place"
    with Installation.running(directory / "home", slots=2) as installation:
        content = config(gate_directory, searcher)
        installation.submit(directory / "model", content, {"train.py": SCRIPT})
        gates = Gates(installation, gate_directory, disturbed)
        gates.run()
        finished = installation.wait_for(1)
        assert finished["state"] == "COMPLETED", installation.lines(1)[-30:]
        trials = installation.client.trials(1)
        ranks = [
            pid for run in installation.home.runs.iterdir()
            for pid in installation.folder(int(run.name)).rank_pids().values()
        ]  # fmt: skip
        query = "SELECT kind, request_id, value, length, reason FROM searcher_events ORDER BY id"
        events = rows(installation, query)
        runs = rows(installation, "SELECT trial_id FROM runs")
    until("no rank is left", lambda: not any(map(psutil.pid_exists, ranks)))
    names = ("id", "hparams", "seed", "state", "steps_completed", "best_validation", "restarts")
    result = {
        "trials": [{field: trial[field] for field in names} for trial in trials],
        "best": (finished["best_trial_id"], finished["best_validation"]),
        "events": events,
        "runs": Counter(trial_id for (trial_id,) in runs),
    }
    return result, gates


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("searcher", "disturbances"),
    [
        (TPE, TPE_DISTURBED),
        pytest.param(PROMOTING, PROMOTING_DISTURBED, marks=pytest.mark.soak),
    ],
)
def test_disturbed_search_equals_undisturbed_search(
    tmp_path: Path, searcher: dict[str, Any], disturbances: dict[int, str]
) -> None:
    plain, plain_gates = search(tmp_path / "plain", searcher, {})
    assert len(plain["trials"]) == searcher["max_trials"]
    assert plain["runs"].total() > len(plain["trials"])  # some were promoted
    if searcher["max_concurrent_trials"] == 2:
        assert plain_gates.both_waiting >= searcher["max_trials"]
    disturbed, gates = search(tmp_path / "disturbed", searcher, disturbances)
    assert gates.killed.total() == list(disturbances.values()).count("trial")
    # One more run for each that died. Only killed ranks count as restarts.
    assert disturbed["runs"] == plain["runs"] + gates.restarted
    for trial in disturbed["trials"]:
        assert trial.pop("restarts") == gates.killed[trial["id"]]
    for trial in plain["trials"]:
        assert trial.pop("restarts") == 0
    del disturbed["runs"], plain["runs"]
    assert disturbed == plain
