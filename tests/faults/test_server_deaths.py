"""Searches whose server is killed at every event equal undisturbed ones."""

import itertools
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.installation import ENDED, Installation
from tests.faults.fork_server import ForkServer
from tests.waiting import until
from zerolab.client import archive
from zerolab.errors import UnreachableError

SCRIPT = """
import os, pathlib
import zerolab.core

with zerolab.core.init() as context:
    info = context.info
    with (pathlib.Path(info.config["data"]["seen"]) / str(info.trial_id)).open("a") as file:
        file.write(f"{os.getpid()}\\n")
    lr = context.train.get_hparams()["lr"]
    before = context.train.latest_checkpoint
    begin = before.steps_completed if before else 0
    for step in [each for each in (6, 20) if begin < each <= (context.train.until or 20)]:
        context.train.report_validation_metrics(step, {"loss": lr / step})
        with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "weights").write_text(str(lr))
"""

PROMOTING = {
    "name": "async_halving", "metric": "loss", "num_rungs": 2, "divisor": 3, "stop_once": False,
    "max_length": 20, "max_trials": 3,
    "max_concurrent_trials": 2,  # so the third trial is created where another has paused
}  # fmt: skip
"""All pause after 6 batches. When the third does, in any order, the best is promoted."""


class DyingServers:
    """Servers of one installation, each of which dies at its first event.

    Each event is handled twice: by a server that dies before the commit, and by one that dies
    after it.
    """

    def __init__(self, installation: Installation, fork_server: ForkServer) -> None:
        self._installation = installation
        self._fork_server = fork_server
        self._pid = 0
        self._moments = itertools.cycle(["before", "after"])
        self.deaths = 0

    def next(self) -> None:
        """Start a server, and wait until it listens."""
        home = self._installation.home
        home.server_file.unlink(missing_ok=True)
        self._installation._forget_client()
        arguments = ["--home", str(home.path), "--port", str(self._installation.port)]
        self._pid = self._fork_server.start(
            "tests.faults.dying_server:serve", next(self._moments), arguments
        )
        until("the server listens, or is dead", lambda: home.server_file.exists() or self.dead())

    def dead(self) -> bool:
        return self._fork_server.ended(self._pid)

    def revive(self) -> None:
        """Start the next server, if this one is dead: until one of them listens."""
        while self.dead():
            assert self._fork_server.wait(self._pid) == -9, self._fork_server.log.read_text()[
                -2000:
            ]
            self.deaths += 1
            self.next()


def config(directory: Path, searcher: dict[str, Any]) -> dict[str, Any]:
    seen = directory / "seen"
    seen.mkdir()
    return {
        "name": "mortal",
        "entrypoint": "python train.py",
        "data": {"seen": str(seen)},
        "hyperparameters": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": searcher,
        "reproducibility": {"experiment_seed": 11},
    }


def outcome(installation: Installation, seen: Path) -> dict[str, Any]:
    """Return the result of a search, and the number of starts of each trial."""
    client = installation.client
    names = ("hparams", "seed", "state", "steps_completed", "best_validation", "restarts")
    trials = client.trials(1)
    experiment = client.experiment(1)
    pids_by_trial = {trial["id"]: (seen / str(trial["id"])).read_text().split() for trial in trials}
    for pid in itertools.chain.from_iterable(pids_by_trial.values()):
        until(f"process {pid} has ended", lambda pid=pid: not psutil.pid_exists(int(pid)))
    return {
        "trials": [{name: trial[name] for name in names} for trial in trials],
        "best": (experiment["state"], experiment["best_trial_id"], experiment["best_validation"]),
        "starts": {trial: len(pids) for trial, pids in pids_by_trial.items()},
        "checkpoints": sorted(
            (checkpoint["trial_id"], checkpoint["steps_completed"], checkpoint["state"])
            for checkpoint in client.experiment_checkpoints(1)
        ),
    }


def search(directory: Path, searcher: dict[str, Any], slots: int) -> dict[str, Any]:
    """Run a search without disturbance."""
    directory.mkdir()
    with Installation.running(directory / "home", slots) as installation:
        content = config(directory, searcher)
        installation.submit(directory / "model", content, {"train.py": SCRIPT})
        assert installation.wait_for(1)["state"] == "COMPLETED"
        return outcome(installation, directory / "seen")


def search_with_kills(directory: Path, searcher: dict[str, Any], slots: int) -> dict[str, Any]:
    """Run a search whose server is killed at every event."""
    directory.mkdir()
    with Installation.running(directory / "home", slots) as installation:
        installation.kill_server()
        log = directory / "deaths.log"
        with ForkServer("zeroserver.process", "tests.faults.dying_server", log=log) as fork_server:
            servers = DyingServers(installation, fork_server)
            _submit(installation, servers, config(directory, searcher), directory / "model")
            until("the search has ended", lambda: _state(installation, servers), ENDED.__contains__)
            result = outcome(installation, directory / "seen")
        # Submitted, the first at its rung, the third, the best at the end: at least four commits,
        # as two simultaneous events share one.
        assert servers.deaths >= 2 * 4
        return result


def _submit(
    installation: Installation, servers: DyingServers, content: dict[str, Any], model: Path
) -> None:
    """Submit until the experiment exists; a server that dies before the commit stores nothing."""
    model.mkdir()
    (model / "train.py").write_text(SCRIPT)
    servers.next()
    for experiments_created in (0, 1):
        with pytest.raises(UnreachableError):
            installation.client.create_experiment(content, archive.pack(model))
        until("the server is dead", servers.dead)
        servers.revive()
        assert len(installation.client.experiments()) == experiments_created


def _state(installation: Installation, servers: DyingServers) -> str:
    servers.revive()
    try:
        return str(installation.client.experiment(1)["state"])
    except UnreachableError:
        return "unreachable"


@pytest.mark.slow
@pytest.mark.processes
def test_server_killed_at_every_event_equals_undisturbed(
    tmp_path: Path,
) -> None:
    plain = search(tmp_path / "plain", PROMOTING, slots=2)
    winner = plain["best"][1]
    assert plain["starts"] == {trial: 1 + (trial == winner) for trial in range(1, 4)}
    assert [trial["steps_completed"] for trial in plain["trials"]].count(20) == 1
    assert search_with_kills(tmp_path / "mortal", PROMOTING, slots=2) == plain
