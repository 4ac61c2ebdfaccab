"""Killable server for tests, and runs on it that REST calls drive like an agent."""

from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.faults.fork_server import ForkServer
from tests.server.processes import UNHURRIED
from tests.waiting import DEADLINE_S, free_port, until
from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.messages import AgentRegistration, SlotInfo
from zerolab.contract.spec import RunSpec
from zerolab.paths import Home


class KillableServer:
    """Data directory and port on which servers are started and killed."""

    def __init__(self, fork_server: ForkServer, home: Path) -> None:
        self.home = Home(home).create()
        self._fork_server = fork_server
        self._pid = 0
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    @property
    def client(self) -> Client:
        return Client(self.url, self.home.ensure_token(), timeout_s=DEADLINE_S)

    def start(self, *, wait: bool = True) -> None:
        arguments = ["--home", str(self.home.path), "--port", str(self._port), *UNHURRIED]
        self._pid = self._fork_server.start("tests.faults.helpers:serve", arguments)
        if wait:
            until("the server answers", self.answers)

    def kill(self) -> None:
        assert self._fork_server.kill(self._pid) == -9

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/healthz", timeout=DEADLINE_S).is_success
        except httpx.TransportError:
            assert not self._fork_server.ended(self._pid), self._fork_server.log.read_text()[-3000:]
            return False


def serve(arguments: list[str]) -> int:
    """Run the server in a forked child."""
    from zeroserver.process import main

    return main(arguments)


def make_runs(server: KillableServer, count: int, directory: Path) -> list[RunSpec]:
    """Create an experiment with ``count`` trials; return their runs."""
    model = directory / "model"
    model.mkdir(parents=True)
    (model / "model_def.py").write_text("")
    config: dict[str, Any] = {
        "name": "faults",
        "entrypoint": "python model_def.py",
        "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "random",
            "metric": "loss",
            "smaller_is_better": True,
            "max_trials": count,
            "max_concurrent_trials": count,
            "max_length": {"batches": 10**9},
        },
        "resources": {"slots_per_trial": 1},
    }
    with server.client as client:
        slots = [SlotInfo(number, "cpu") for number in range(count)]
        agent = client.register_agent(AgentRegistration("agent", "localhost", slots))
        client.create_experiment(config, archive.pack(model))
        work = until(
            "all trials have runs",
            lambda: client.work(agent, 0, 0),
            lambda work: len(work.runs) == count,
        )
        specs = []
        for item in work.runs:
            run_dir = directory / f"run_{item.run_id}"
            run_dir.mkdir()
            client.run_started(item.run_id)
            specs.append(
                msgspec.structs.replace(item.spec, run_dir=str(run_dir), master=server.url)
            )
    return specs


def stored_points(
    client: Client, spec: RunSpec, name: str = "loss", group: str | None = None
) -> dict[int, float]:
    """Return the stored points of a trial's metric by step; fail on duplicate steps."""
    content = b"".join(client.export_metrics(spec.experiment_id, group=group))
    points: dict[int, float] = {}
    for line in content.splitlines():
        point = msgspec.json.decode(line)
        if point["trial_id"] == spec.trial_id and point["name"] == name:
            assert point["step"] not in points
            points[point["step"]] = float(point["value"])
    return points
