"""Two real agents of a server: one is suspended, killed, drained or stopped."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.installation import in_process
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.client import archive
from zerolab.client.http import Client
from zerolab.contract.spec import ENV_HOME, ENV_MASTER, ENV_TOKEN
from zerolab.linux import kill_all
from zerolab.paths import Home

pytestmark = pytest.mark.processes

SCRIPT = """
import os, pathlib, time
import zerolab.core
gate = pathlib.Path(GATE)
with zerolab.core.init() as context:
    latest = context.train.latest_checkpoint
    begun = latest.steps_completed if latest else 0
    (gate / f"begun_{context.train.info.run_id}_at_{begun}").touch()
    while not (gate / "go").exists() and not context.preempt.should_preempt():
        time.sleep(0.02)
    with context.checkpoint.store_path({"steps_completed": begun + 1}) as (path, uuid):
        (path / "weights").write_text("1")
    if not context.preempt.should_preempt():
        context.train.report_validation_metrics(begun + 1, {"loss": 0.5})
"""
CONFIG = {
    "entrypoint": "python script.py",
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
    "max_restarts": 0,
}


class Farm:
    """A server, and agents as separate processes."""

    def __init__(
        self, path: Path, timeout_s: float, *options: str, **options_of_server: str
    ) -> None:
        self.path = path
        self.gate = path / "gate"
        self.gate.mkdir()
        self.script = SCRIPT
        self.server = LiveServer(
            path / "server", "--agent-timeout", str(timeout_s), *options, **options_of_server
        )
        self.server.start()
        self.client: Client = self.server.client()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(
        self, name: str, *options: str, home: str = "", token: str = "", host: str = ""
    ) -> "subprocess.Popen[bytes]":
        inherited = {k: v for k, v in os.environ.items() if k not in {ENV_MASTER, ENV_TOKEN}}
        environment = inherited | {
            ENV_HOME: str(self.path / (home or name)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = ["agent", "start", "--server", self.server.url]
        environment[ENV_TOKEN] = token or self.server.agent_token
        command += [] if "--resource-manager" in options else ["--cpu"]
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host] if host else []
        with self.log(home or name).open("ab") as log:
            return subprocess.Popen(
                [*rename, sys.executable, "-m", "zerolab", *command, "--name", name, *options],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def log(self, home: str) -> Path:
        return self.path / f"{home}.log"

    def join(self, name: str, *options: str, host: str = "") -> None:
        self.agents[name] = self.spawn(name, *options, host=host)
        until(f"agent {name} is there", lambda: self.state(name), lambda s: s == "ready",
              details=self.log(name).read_text)  # fmt: skip

    def state(self, name: str) -> str:
        states = [
            resource["state"] for resource in self.client.agents() if resource["name"] == name
        ]
        return str(states[0]) if states else "unknown"

    def await_state(self, name: str, state: str) -> None:
        until(f"agent {name} is {state}", lambda: self.state(name), lambda s: s == state)

    def signal(self, name: str, number: int) -> None:
        self.agents[name].send_signal(number)

    def submit(self, **changes: Any) -> int:
        model = self.path / "model"
        model.mkdir(exist_ok=True)
        (model / "script.py").write_text(self.script.replace("GATE", repr(str(self.gate))))
        created = self.client.create_experiment({**CONFIG, **changes}, archive.pack(model))
        return int(created["id"])

    def wait_for_starts(self, number: int) -> list[str]:
        """Wait until N runs have started; return each as ``begun_RUN_at_STEP``."""
        return until(
            f"{number} runs have begun",
            lambda: sorted(
                resource.name for resource in self.gate.iterdir() if resource.name != "go"
            ),
            lambda names: len(names) >= number,
            details=lambda: "\n".join(log.read_text()[-2000:] for log in self.path.glob("*.log")),
        )

    def agent_of(self, run_id: int) -> str:
        """Return the name of the agent with the slots of a run."""
        for resource in self.client.agents():
            if any(slot["run_id"] == run_id for slot in resource["slots"]):
                return str(resource["name"])
        return ""

    def finish(self, experiment_id: int) -> dict[str, Any]:
        """Let the runs end; return the only trial after the end of the experiment."""
        (self.gate / "go").touch()
        ended = until(
            f"experiment {experiment_id} has ended",
            lambda: self.client.experiment(experiment_id),
            lambda resource: resource["state"] in {"COMPLETED", "ERROR", "CANCELED"},
        )
        assert ended["state"] == "COMPLETED", ended["error"]
        (trial,) = self.client.trials(experiment_id)
        return trial

    def cli(self, *arguments: str) -> str:
        environment = {**os.environ, ENV_MASTER: self.server.url, ENV_TOKEN: self.server.token}
        return in_process(environment, *arguments).stdout

    def close(self) -> None:
        for agent in self.agents.values():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                agent.send_signal(signal.SIGCONT)
                tree = psutil.Process(agent.pid)
                kill_all([*tree.children(recursive=True), tree])
            agent.wait(DEADLINE_S)
        self.server.close()


@pytest.fixture
def farm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Farm]:
    created = Farm(tmp_path, getattr(request, "param", 150.0))
    try:
        yield created
    finally:
        created.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    created = Farm(tmp_path_factory.mktemp("farm"), 150.0)
    try:
        yield created
    finally:
        created.close()


@pytest.fixture
def pair(shared: Farm) -> Farm:
    """The agents a and b, without files of earlier runs."""
    for file in shared.gate.iterdir():
        file.unlink()
    for name in ("a", "b"):
        if name not in shared.agents or shared.agents[name].poll() is not None:
            shared.join(name, "--slots", "1")
    return shared


def agent_and_other(farm: Farm, experiment_id: int) -> tuple[str, str]:
    """Return the agent of an experiment's run, and the other agent."""
    (trial,) = farm.client.trials(experiment_id)
    name = farm.agent_of(trial["run_id"])
    return name, {"a": "b", "b": "a"}[name]


def test_run_continues_after_agent_outage(pair: Farm) -> None:
    experiment_id = pair.submit()
    pair.wait_for_starts(1)
    name, _ = agent_and_other(pair, experiment_id)
    pair.signal(name, signal.SIGSTOP)
    pair.await_state(name, "silent")
    pair.signal(name, signal.SIGCONT)
    pair.await_state(name, "ready")
    trial = pair.finish(experiment_id)
    assert (trial["restarts"], len(pair.wait_for_starts(1))) == (0, 1)


@pytest.mark.parametrize("farm", [20.0], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_trial_of_lost_agent_moves_uncounted(farm: Farm, number: int) -> None:
    farm.join("a", "--slots", "1")
    experiment_id = farm.submit()
    farm.wait_for_starts(1)
    farm.join("b", "--slots", "1")
    farm.signal("a", number)
    farm.wait_for_starts(2)
    (trial,) = farm.client.trials(experiment_id)
    assert farm.agent_of(trial["run_id"]) == "b"
    assert farm.state("a") == "gone"
    if number == signal.SIGSTOP:  # it returns too late and ends a superseded run
        farm.signal("a", signal.SIGCONT)
        farm.await_state("a", "ready")
        tree = psutil.Process(farm.agents["a"].pid)
        until("its old run has ended", lambda: _trials(tree), lambda states: not states)
    assert farm.finish(experiment_id)["restarts"] == 0


def _trials(agent: psutil.Process) -> list[int]:
    """Return the ranks of an agent."""
    states = []
    for process in agent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "script.py" in " ".join(process.cmdline()):
                states.append(process.pid)
    return states


def test_drain_and_disable_of_agent(pair: Farm) -> None:
    experiment_id = pair.submit()
    pair.wait_for_starts(1)
    first, other = agent_and_other(pair, experiment_id)
    assert f"agent {first} is draining" in pair.cli("agent", "drain", first)
    assert agent_and_other(pair, experiment_id) == (first, other)
    pair.cli("agent", "drain", first, "--preempt")
    assert pair.wait_for_starts(2)[-1].endswith("_at_1")  # from its last checkpoint
    assert agent_and_other(pair, experiment_id) == (other, first)
    assert pair.state(first) == "disabled"
    assert pair.finish(experiment_id)["restarts"] == 0
    assert f"agent {first} is ready" in pair.cli("agent", "enable", first)


def test_trial_of_stopped_agent_moves(pair: Farm) -> None:
    experiment_id = pair.submit()
    pair.wait_for_starts(1)
    name, _ = agent_and_other(pair, experiment_id)
    pair.signal(name, signal.SIGTERM)
    assert pair.wait_for_starts(2)[-1].endswith("_at_1")
    pair.await_state(name, "gone")
    assert pair.agents[name].wait(DEADLINE_S) == 0
    assert pair.finish(experiment_id)["restarts"] == 0


def test_agents_take_runs_of_their_pool(farm: Farm) -> None:
    farm.join("a", "--slots", "1")
    farm.join("b", "--slots", "2", "--pool", "big")
    farm.submit(resources={"resource_pool": "big", "slots_per_trial": 1})
    farm.wait_for_starts(1)
    (trial,) = farm.client.trials(1)
    assert farm.agent_of(trial["run_id"]) == "b"
    farm.finish(1)


def test_polling_errors_are_logged_once(
    farm: Farm,
) -> None:
    farm.join("a", "--slots", "1")
    second = farm.spawn("a", home="elsewhere")
    stranger = farm.spawn("stranger", token="wrong")
    assert second.wait(DEADLINE_S) == stranger.wait(DEADLINE_S) == 2
    assert "another agent named a is connected" in farm.log("elsewhere").read_text()
    log = farm.log("stranger").read_text()
    line = log.splitlines()[-1]
    assert "a valid token is needed" in line
    assert "Traceback" not in log
    assert line.endswith("run `zerolab agent token` on the server, and use --token-file here")
    farm.await_state("a", "ready")
    farm.server.stop()
    Home(farm.server.home).replace_agent_token()
    farm.agents["early"] = farm.spawn("early")
    no_server = "polling failed, retrying: no Zerolab server responds"
    for name in ("a", "early"):
        until(f"{name} finds no server", farm.log(name).read_text, lambda log: no_server in log)
    farm.server.start()
    farm.client = farm.server.client()
    again, void = "polling succeeded again", f"polling failed, retrying: {farm.server.url}: a valid"
    until("one gets work", farm.log("early").read_text, lambda log: again in log)
    until("one has an old token", farm.log("a").read_text, lambda log: void in log)
    farm.signal("a", signal.SIGTERM)
    assert farm.agents["a"].wait(DEADLINE_S) == 0
    for name in ("a", "early"):
        log = farm.log(name).read_text()
        assert "Traceback" not in log
        reasons = re.findall(f"{no_server}|{void}|{again}", log)
        assert all(resource != after for resource, after in itertools.pairwise(reasons)), log


def test_unreachable_checkpoint_has_waiting_reason(
    tmp_path: Path,
) -> None:
    farm = Farm(tmp_path, 150.0)
    try:
        farm.join("a")
        resource = farm.submit()
        farm.wait_for_starts(1)
        farm.cli("agent", "disable", "a")
        trial = until(
            "the trial has left",
            lambda: farm.client.trials(resource)[0],
            lambda states: states["state"] == "QUEUED" and states["latest_checkpoint"],
        )
        (saved,) = farm.client.experiment_checkpoints(resource)
        options_of_server = Path(saved["path"])
        hidden = options_of_server.rename(
            tmp_path / "only_on_a"
        )  # like a disk that the next machine lacks
        farm.join("b")
        log = until(
            "it waits for the checkpoint",
            lambda: str(farm.client.trials(resource)[0]["waiting_reason"]),
            lambda reason: "was saved in" in reason,
        )
        assert trial["latest_checkpoint"] in log
        assert f"in {options_of_server.parent} on agent a (" in log
        assert "set checkpoint_storage to a directory that every machine sees" in log
        hidden.rename(options_of_server)
        assert sum(name.endswith("_at_1") for name in farm.wait_for_starts(2)) == 1
        assert farm.finish(resource)["restarts"] == 0
    finally:
        farm.close()
