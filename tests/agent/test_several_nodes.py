"""A trial on two agents: rendezvous, logs, checkpoints, and a lost agent."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.test_two_agents import Farm
from tests.waiting import until

pytestmark = pytest.mark.processes

SCRIPT = """
import os, pathlib, time
import zerolab.core
gate = pathlib.Path(GATE)
with zerolab.core.init() as context:
    ranks = context.distributed
    everyone = ranks.allgather((ranks.rank, ranks.local_rank, os.environ["GROUP_RANK"]))
    if staged := os.environ.get("ZEROLAB_STAGED_DATA"):
        print("data", (pathlib.Path(staged) / "part").read_text())
    print("ranks", *(word for each in everyone for word in each))
    latest = context.train.latest_checkpoint
    begun = latest.steps_completed if latest else 0
    (gate / f"begun_{context.train.info.run_id}_at_{begun}_rank_{ranks.rank}").touch()
    leaves = False
    context.train.report_training_metrics(begun, {"loss": 1.0})
    # One rank checks for all: the others may see the file later.
    while not ranks.broadcast((gate / "go").exists()) and not leaves:
        leaves = context.preempt.should_preempt()
        if (gate / f"fail_{ranks.rank}").exists():
            raise ValueError("no such layer")
        if begun == 0:
            begun = 1
            with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, _):
                (path / f"weights_{ranks.rank}").write_text("1")
        time.sleep(0.02)
    if not leaves and ranks.is_chief:
        context.train.report_validation_metrics(begun, {"loss": 0.5})
"""
SPREAD = {"slots_per_trial": 3, "max_nodes": 2}


def lines_of(farm: Farm, experiment_id: int) -> list[str]:
    """Return the lines of an experiment's log."""
    page = farm.client.experiment_logs(experiment_id, limit=1000)
    return [line["text"] for line in page["logs"]]


@pytest.fixture(scope="module")
def two_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    farm = Farm(tmp_path_factory.mktemp("farm"), 20.0)
    farm.script = SCRIPT
    try:
        farm.join("large", "--slots", "2")
        farm.join("small", "--slots", "1")
        yield farm
    finally:
        farm.close()


@pytest.fixture
def farm(two_agents: Farm) -> Farm:
    """Two agents without runs, and without the files of earlier runs."""
    for file in two_agents.gate.iterdir():
        file.unlink()
    return two_agents


def test_trial_on_two_agents_survives_lost_one(farm: Farm) -> None:
    source, staged = farm.path / "source", farm.path / "scratch" / "data"
    source.mkdir()
    (source / "part").write_text("17")
    stage = {"from": str(source), "to": str(staged), "once_per": "node"}
    experiment_id = farm.submit(resources=SPREAD, max_restarts=1, data={"stage": stage})
    begun = farm.wait_for_starts(3)
    assert [name.rpartition("_at_")[2] for name in begun] == ["0_rank_0", "0_rank_1", "0_rank_2"]
    run_id = int(begun[0].split("_")[1])
    runs_of_slots = {
        a["name"]: [slot["run_id"] for slot in a["slots"]] for a in farm.client.agents()
    }
    assert runs_of_slots == {"large": [run_id, run_id], "small": [run_id]}
    (trial,) = farm.client.trials(experiment_id)
    until(
        "there is a checkpoint",
        lambda: farm.client.trial(trial["id"])["latest_checkpoint"],
    )
    until(
        "every rank's line is there",
        lambda: lines_of(farm, experiment_id).count("ranks 0 0 0 1 1 0 2 0 1"),
        lambda count: count == 3,
        details=lambda: "\n".join(lines_of(farm, experiment_id)),
    )

    until(
        "each machine says what it does",
        lambda: {curve["name"] for curve in farm.client.metrics(trial["id"], "system")},
        lambda names: {"machine0/cpu_percent", "machine1/cpu_percent"} <= names,
    )

    farm.signal("small", signal.SIGKILL)  # its rank dies with it
    farm.agents["small"].wait()
    farm.await_state("small", "gone")
    farm.join("small", "--slots", "1")
    farm.wait_for_starts(6)
    ended = farm.finish(experiment_id)
    assert ended["restarts"] == 0  # a lost machine is not counted as a failure
    lost = "was lost: agent small: agent small has sent no heartbeat"
    lines = lines_of(farm, experiment_id)
    assert any(lost in line for line in lines)
    # Both agents are on this machine: one copied the data for both and for the next run.
    assert sum(f"is copied to {staged}" in line for line in lines) == 1, lines
    assert lines.count("data 17") >= 6, lines


def test_failed_rank_is_named_with_agent(farm: Farm) -> None:
    experiment_id = farm.submit(resources=SPREAD)
    farm.wait_for_starts(3)
    (farm.gate / "fail_2").touch()
    ended = until(
        "the experiment has ended",
        lambda: farm.client.experiment(experiment_id),
        lambda experiment: experiment["state"] == "ERROR",
    )
    (trial,) = farm.client.trials(experiment_id)
    assert trial["error"].startswith("agent small: rank 2 exited with code 1: script.py:")
    assert "ValueError: no such layer" in trial["error"]
    assert ended["state"] == "ERROR"
    free = [slot["run_id"] for a in farm.client.agents() for slot in a["slots"]]
    assert free == [None, None, None]


def test_too_few_machines_has_waiting_reason(farm: Farm) -> None:
    experiment_id = farm.submit(resources={"slots_per_trial": 3})
    (trial,) = farm.client.trials(experiment_id)
    lines = until(
        "there is a reason", lambda: str(farm.client.trial(trial["id"])["waiting_reason"] or "")
    )
    assert "3 slots on one machine" in lines
    farm.client.experiment_action(experiment_id, "kill")


def test_all_workers_names_every_host(tmp_path: Path) -> None:
    rename = ["unshare", "--uts", "hostname", "127.0.0.2"]
    if not shutil.which("hostname") or subprocess.run(rename, check=False).returncode:
        pytest.skip("needs the right to make a UTS namespace")
    farm = Farm(tmp_path, 20.0)
    farm.script = "import os, socket\nprint(socket.gethostname(), 'of', os.environ['ALL_WORKERS'])"
    try:
        for host in ("127.0.0.2", "127.0.0.3"):
            farm.join(f"agent-{host}", "--slots", "2", host=host)
        resources = {"slots_per_trial": 4, "max_nodes": 2}
        experiment_id = farm.submit(resources=resources, searcher={"name": "single"})
        ended = until(
            "the experiment has ended",
            lambda: farm.client.experiment(experiment_id),
            lambda experiment: experiment["state"] in {"COMPLETED", "ERROR"},
        )
        lines = lines_of(farm, experiment_id)
        assert ended["state"] == "COMPLETED", lines
        for host in ("127.0.0.2", "127.0.0.3"):
            assert lines.count(f"{host} of 127.0.0.2,127.0.0.3") == 2, lines
    finally:
        farm.close()
