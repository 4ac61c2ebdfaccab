"""A search of thirty trials whose server, trials and agent are killed ends as if nothing had been.

The thirty train two at a time, one on each slot. What makes the comparison exact: training follows
from hyperparameters and checkpoint alone, and each stretch of a trial ends behind a gate. When all
that train stand at theirs, one of them, by a rule, passes: it reports and leaves, and others begin.
So results reach the searcher in one order, whatever takes how long. Left to the clock it would be
another one each time, and a searcher that learns from results could choose other trials, disturbed
or not.
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
    "name": "tpe_asha", "max_length": {"batches": 27}, "max_trials": 30,
    "max_concurrent_trials": 2,
}  # fmt: skip
TPE_DISTURBED = {3: "server", 8: "trial", 14: "server", 20: "agent", 26: "trial", 32: "server"}
"""How many stretches have ended, to what is killed next."""

PROMOTING = {
    "name": "async_halving", "num_rungs": 3, "divisor": 3, "stop_once": False,
    "max_length": {"batches": 27}, "max_trials": 9, "max_concurrent_trials": 1,
}  # fmt: skip
PROMOTING_DISTURBED = {2: "server", 5: "trial", 8: "agent"}
"""Its trials have two ranks, and both slots."""


def config(place: Path, searcher: Mapping[str, Any]) -> dict[str, Any]:
    place.mkdir()
    return {
        "name": "disturbed",
        "entrypoint": "python train.py",
        "data": {"place": str(place)},
        "hyperparameters": {
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": 0},
            "momentum": {"type": "double", "minval": 0, "maxval": 0.95},
        },
        "searcher": {"metric": "loss", **searcher},
        "resources": {"slots_per_trial": 2 // searcher["max_concurrent_trials"]},
        "reproducibility": {"experiment_seed": 3},
    }  # fmt: skip


def rows(installation: Installation, query: str) -> list[Any]:
    """Ask the database: a tenth of what it costs to ask the server, which is asked often here."""
    with closing(sqlite3.connect(installation.home.database)) as database:
        return database.execute(query).fetchall()


class Gates:
    """Lets the trials of a search pass one at a time, by a rule that knows no clock.

    Args:
        installation: Where experiment 1 is the search.
        place: Where its trials say that they are there, and look for leave to go on.
        disturbed: How many stretches have ended, to what is killed then.
    """

    def __init__(
        self, installation: Installation, place: Path, disturbed: Mapping[int, str]
    ) -> None:
        self._installation = installation
        self._place = place
        self._disturbed = disturbed
        self.killed: Counter[int] = Counter()
        """Trial, to how often it was killed itself."""
        self.begun_again: Counter[int] = Counter()
        """Trial, to how many of its runs died at a gate."""
        self.side_by_side = 0
        """How often two stood at their gates."""

    def run(self) -> None:
        """Open one gate after another, until nobody trains any more."""
        for ended in itertools.count():
            standing = until(
                "all that train stand at their gates",
                self._standing,
                lambda found: found is not None,
                not_yet=sqlite3.OperationalError,
                details=lambda: "\n".join(self._installation.lines(1)[-30:]),
            )
            if not standing:
                break
            self.side_by_side += len(standing) == 2
            trial_id = Random(ended).choice(sorted(standing))
            self._pass(trial_id, standing, self._disturbed.get(ended, ""))

    def _standing(self) -> dict[int, Path] | None:
        """Trial to its run's mark, of all that train; None while one of them is on its way.

        Nobody trains when the search is over.
        """
        found = {}
        query = "SELECT id, run_id, state FROM trials WHERE state NOT IN ('PAUSED', 'COMPLETED')"
        for trial_id, run_id, state in rows(self._installation, query):
            marks = list(self._place.glob(f"here-{trial_id}-*-{run_id}"))
            if state != "RUNNING" or not marks or self._gate(marks[0]).exists():
                return None
            found[trial_id] = marks[0]
        if not found and rows(
            self._installation, "SELECT 1 FROM experiments WHERE state = 'ACTIVE'"
        ):
            return None
        return found

    def _gate(self, mark: Path) -> Path:
        return self._place / mark.name.rpartition("-")[0].replace("here", "go")

    def _pass(self, trial_id: int, standing: Mapping[int, Path], killed: str) -> None:
        """Kill something while all stand at their gates, and open the gate of one."""
        gate = self._gate(standing[trial_id])
        runs = {trial: int(mark.name.rpartition("-")[2]) for trial, mark in standing.items()}
        if killed == "server":
            self._installation.kill_server()
            gate.touch()  # it trains on, and ends, while there is no server
            self._installation.up()
        elif killed == "agent":
            ranks = [
                pid for run in runs.values()
                for pid in self._installation.folder(run).rank_pids().values()
            ]  # fmt: skip
            self._installation.kill_agent()
            # They die with it, a moment later: one that still passed would have reported.
            until("its ranks are dead", lambda: not any(map(psutil.pid_exists, ranks)))
            self.begun_again.update(runs.keys())
            gate.touch()
            self._installation.up()
        elif killed == "trial":
            os.kill(self._installation.rank_pid(runs[trial_id]), signal.SIGKILL)
            self.killed[trial_id] += 1
            self.begun_again[trial_id] += 1
            gate.touch()
        else:
            gate.touch()


def search(
    directory: Path, searcher: Mapping[str, Any], disturbed: Mapping[int, str]
) -> tuple[dict[str, Any], Gates]:
    """Run a search; return all that it has come to, and what was done to it."""
    directory.mkdir()
    place = directory / "place"
    with Installation.running(directory / "home", slots=2) as installation:
        content = config(place, searcher)
        installation.submit(directory / "model", content, {"train.py": SCRIPT})
        gates = Gates(installation, place, disturbed)
        gates.run()
        ended = installation.wait_for(1)
        assert ended["state"] == "COMPLETED", installation.lines(1)[-30:]
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
    found = {
        "trials": [{each: trial[each] for each in names} for trial in trials],
        "best": (ended["best_trial_id"], ended["best_validation"]),
        "events": events,
        "runs": Counter(trial_id for (trial_id,) in runs),
    }
    return found, gates


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("searcher", "disturbances"), [(TPE, TPE_DISTURBED), (PROMOTING, PROMOTING_DISTURBED)]
)
def test_a_disturbed_search_has_the_trials_rungs_and_best_of_one_that_was_left_alone(
    tmp_path: Path, searcher: dict[str, Any], disturbances: dict[int, str]
) -> None:
    plain, left_alone = search(tmp_path / "plain", searcher, {})
    assert len(plain["trials"]) == searcher["max_trials"]
    assert plain["runs"].total() > len(plain["trials"])  # some were promoted
    if searcher["max_concurrent_trials"] == 2:
        assert left_alone.side_by_side >= searcher["max_trials"]
    disturbed, gates = search(tmp_path / "disturbed", searcher, disturbances)
    assert gates.killed.total() == list(disturbances.values()).count("trial")
    # One run more for each that died, and no other; only that a rank was killed is counted.
    assert disturbed["runs"] == plain["runs"] + gates.begun_again
    for trial in disturbed["trials"]:
        assert trial.pop("restarts") == gates.killed[trial["id"]]
    for trial in plain["trials"]:
        assert trial.pop("restarts") == 0
    del disturbed["runs"], plain["runs"]
    assert disturbed == plain
