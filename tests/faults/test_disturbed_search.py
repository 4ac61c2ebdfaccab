"""A search of thirty trials whose server, trials and agent are killed ends as if nothing had been.

What makes the comparison exact: one trial has slots at a time (``max_concurrent_trials: 1``, with
both slots), so results reach the searcher in one order, whatever takes how long; and training
follows from hyperparameters and checkpoint alone. Where several trials run side by side, the order
of their results is that of the clock, and a searcher that learns from results may then choose
other trials, disturbed or not.
"""

import os
import signal
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
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
    gate = place / f"gate-{info.trial_id}"
    if ranks.is_chief and gate.exists():
        (place / f"here-{info.trial_id}-{info.run_id}").touch()
        while gate.exists():
            time.sleep(0.01)
    until = context.train.until or 27
    for step in range(start + 1, until + 1):
        mine = (3.0, 1.0)[ranks.rank] * x[ranks.rank]  # a rank has one of the two gradients
        gradient = ranks.allgather(mine)
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

TPE = {"name": "tpe_asha", "max_length": {"batches": 27}, "max_trials": 30}
TPE_DISTURBED = {3: "server", 6: "trial", 11: "server", 14: "agent", 17: "trial", 22: "server"}
"""Trial, in whose first run it happens, to what is killed."""

PROMOTING = {
    "name": "async_halving", "num_rungs": 3, "divisor": 3, "stop_once": False,
    "max_length": {"batches": 27}, "max_trials": 9,
}  # fmt: skip
PROMOTING_DISTURBED = {3: "server", 5: "trial", 7: "agent"}


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
        "searcher": {
            "metric": "loss", "max_concurrent_trials": 1, **searcher,
        },
        "resources": {"slots_per_trial": 2},
        "reproducibility": {"experiment_seed": 3},
    }  # fmt: skip


def disturb(installation: Installation, place: Path, trial_id: int, what: str) -> None:
    """Kill something while a trial stands at its gate, and let the trial pass."""
    gate = place / f"gate-{trial_id}"
    (here,) = until(
        f"trial {trial_id} stands at its gate",
        lambda: list(place.glob(f"here-{trial_id}-*")),
        told=lambda: "\n".join(installation.lines(1)[-30:]),
    )
    run_id = int(here.name.rpartition("-")[2])
    if what == "server":
        installation.kill_server()
        gate.unlink()  # it trains on, and ends, while there is no server
        installation.up()
    elif what == "agent":
        ranks = installation.folder(run_id).rank_pids().values()
        installation.kill_agent()
        # They die with it, a moment later: one that still passed the gate would have reported.
        until("its ranks are dead", lambda: not any(map(psutil.pid_exists, ranks)))
        gate.unlink()
        installation.up()
    else:
        os.kill(installation.rank_pid(run_id, rank=0), signal.SIGKILL)
        gate.unlink()


def search(
    directory: Path, searcher: Mapping[str, Any], disturbed: Mapping[int, str]
) -> dict[str, Any]:
    """Run a search; return all that it has come to."""
    directory.mkdir()
    place = directory / "place"
    with Installation.running(directory / "home", slots=2) as installation:
        content = config(place, searcher)
        for trial_id in disturbed:
            (place / f"gate-{trial_id}").touch()
        installation.submit(directory / "model", content, {"train.py": SCRIPT})
        for trial_id, what in disturbed.items():
            disturb(installation, place, trial_id, what)
        ended = installation.wait_for(1)
        assert ended["state"] == "COMPLETED", installation.lines(1)[-30:]
        trials = installation.client.trials(1)
        ranks = [
            pid for run in installation.home.runs.iterdir()
            for pid in installation.folder(int(run.name)).rank_pids().values()
        ]  # fmt: skip
        with closing(sqlite3.connect(installation.home.database)) as database:
            events = database.execute(
                "SELECT kind, request_id, value, length, reason FROM searcher_events ORDER BY id"
            ).fetchall()
            runs = database.execute("SELECT trial_id FROM runs ORDER BY id").fetchall()
    until("no rank is left", lambda: not any(map(psutil.pid_exists, ranks)))
    names = ("id", "hparams", "seed", "state", "steps_completed", "best_validation")
    return {
        "trials": [{each: trial[each] for each in names} for trial in trials],
        "best": (ended["best_trial_id"], ended["best_validation"]),
        "events": events,
        "runs": [trial_id for (trial_id,) in runs],
        "restarts": {trial["id"]: trial["restarts"] for trial in trials if trial["restarts"]},
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("searcher", "disturbances"), [(TPE, TPE_DISTURBED), (PROMOTING, PROMOTING_DISTURBED)]
)
def test_a_disturbed_search_has_the_trials_rungs_and_best_of_one_that_was_left_alone(
    tmp_path: Path, searcher: dict[str, Any], disturbances: dict[int, str]
) -> None:
    plain = search(tmp_path / "plain", searcher, {})
    assert len(plain["trials"]) == searcher["max_trials"]
    assert len(plain["runs"]) > len(plain["trials"])  # some were promoted
    disturbed = search(tmp_path / "disturbed", searcher, disturbances)
    again = [trial for trial, what in disturbances.items() if what != "server"]
    for trial_id in again:  # their first runs were killed: one run more, and no other
        disturbed["runs"].remove(trial_id)
    killed = [trial for trial, what in disturbances.items() if what == "trial"]
    assert disturbed.pop("restarts") == dict.fromkeys(killed, 1)  # the agent's is not counted
    del plain["restarts"]
    assert disturbed == plain
