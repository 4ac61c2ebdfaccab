"""A trial class on two machines of a hostfile that are only reachable by ssh."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.agent.test_classes_over_agents import BATCHES, Classes, config
from tests.extensions.launcher_ssh.namespaces import Network, network
from tests.extensions.launcher_ssh.sshd import Keys, Machine, sshd
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.machines]

HOSTS = "worker-1 slots=2\nworker-2 slots=2\n"


@pytest.fixture
def net() -> Iterator[Network]:
    with network("zlx", 79) as created:
        yield created


@pytest.fixture
def farm(tmp_path: Path, net: Network) -> Iterator[Classes]:
    keys = Keys(tmp_path / "keys")
    machines = [
        Machine(f"worker-{number}", address, 2222)
        for number, address in enumerate(net.addresses, start=1)
    ]
    keys.write_config(machines)
    with ExitStack() as stack:
        for machine, name in zip(machines, net.names, strict=True):
            stack.enter_context(sshd(keys, machine, namespace=name))
        created = Classes(tmp_path, 150.0)
        try:
            (tmp_path / "model").mkdir()
            (tmp_path / "model/hosts").write_text(HOSTS)
            created.join("head", "--slots", "1")
            yield created
        finally:
            created.close()


def ssh_to(farm: Classes, host: str) -> psutil.Process:
    """Return the ssh process of the connection to a machine."""
    tree = psutil.Process(farm.agents["head"].pid).children(recursive=True)
    (process,) = [entry for entry in tree if entry.name() == "ssh" and host in entry.cmdline()]
    return process


@pytest.mark.soak
def test_hostfile_trial_survives_lost_machine(farm: Classes, net: Network, tmp_path: Path) -> None:
    servers = {name: set(net.processes(name)) for name in net.names}
    reference = farm.losses(farm.train(config(1, 0, accumulation=3)))

    experiment = config(1, 2)
    experiment["resources"] = {
        "hostfile": "hosts", "exclude": "worker-2:0", "ssh_config": str(tmp_path / "keys/config"),
        "elastic": {"min_slots": 1},  # 3 and 1: two ranks cannot share the batch
    }  # fmt: skip
    (farm.gate / "slow").touch()
    entry = farm.train(experiment)
    farm.await_ranks(3)
    for mark in farm.gate.glob("waits_*"):
        mark.unlink()
    ssh_to(farm, "worker-2").kill()
    farm.await_ranks(3)  # it has restarted
    farm.client.experiment_action(entry, "pause")
    (farm.gate / "leave").touch()
    (farm.gate / "go").touch()
    until("it has paused", lambda: farm.client.experiment(entry)["state"], lambda s: s == "PAUSED")
    until(
        "the agent's slot is free",
        lambda: [slot["run_id"] for agent in farm.client.agents() for slot in agent["slots"]],
        lambda runs: runs == [None],
    )
    (trial,) = farm.client.trials(entry)
    assert trial["restarts"] == 0
    (curve,) = farm.client.metrics(trial["id"], "training", ["loss"])
    losses = {int(step): float(value) for step, value in curve["points"]}
    assert 0 < trial["steps_completed"] <= len(losses) < BATCHES
    expected = {step: loss for step, loss in reference.items() if step in losses}
    assert losses == pytest.approx(expected, abs=1e-5)

    logs = "\n".join(
        line["text"] for line in farm.client.experiment_logs(entry, limit=1000)["logs"]
    )
    assert "ranks on worker-1 (2 slots), worker-2 (1 slot)" in logs
    assert "worker-2: the node is lost" in logs
    for name in net.names:
        until(
            "nothing is left on the machines",
            lambda name=name: set(net.processes(name)) - servers[name],  # type: ignore[misc]
            lambda remaining: not remaining,
        )

    net.cut("zlx2")
    for mark in ("leave", "slow", *(entry.name for entry in farm.gate.glob("waits_*"))):
        (farm.gate / mark).unlink()
    farm.client.experiment_action(entry, "activate")
    assert farm.losses(entry) == pytest.approx(reference, abs=1e-5)
    lines = [line["text"] for line in farm.client.experiment_logs(entry, limit=1000)["logs"]]
    (restart_line,) = [line for line in lines if "the run begins on" in line]
    assert "worker-2: the node is lost: " in restart_line
    assert restart_line.endswith("the run begins on 1 of 2 machines (1 rank): worker-1")
    (trial,) = farm.client.trials(entry)
    assert trial["restarts"] == 0
