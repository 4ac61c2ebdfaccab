"""A trial class with ZeRO stage 3 on two nodes, with all of Slurm's interruptions."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_two_agents import Farm
from tests.extensions.launcher_slurm import gated
from tests.extensions.launcher_slurm.cluster import Cluster
from tests.waiting import DEADLINE_S, until
from zerolab.errors import ConfigError

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

STEPS = 12
GATES = (2, 4, 6, 8, 10)
SCRIPT = """
import sys
assert "torch._dynamo" in sys.modules, "the launcher of a node imports for all its ranks"
from gated import Gated, listen
listen()
"""
SLURM = """
resource_manager:
  type: slurm
  partition: low
  nodes: 2
  slots_per_node: 2
  grace_s: 115
  sbatch_args: [--time=30]
"""


@pytest.fixture
def farm(slurm: Cluster, tmp_path: Path) -> Iterator[Farm]:
    created = Farm(tmp_path, 300.0, "--allow-remote", "--grow-after", "1", host=slurm.net.host)
    created.script = SCRIPT
    try:
        (tmp_path / "slurm.yaml").write_text(SLURM)
        created.join("slurm", "--resource-manager", str(tmp_path / "slurm.yaml"))
        yield created
    finally:
        created.close()


def submit(farm: Farm, slots: int, **resources: Any) -> int:
    model = farm.path / "model"
    model.mkdir(exist_ok=True)
    shutil.copy(gated.__file__, model)
    return farm.submit(
        entrypoint="script:Gated",
        hyperparameters={
            "gate": str(farm.gate), "gates": GATES, "deepspeed_config": gated.engine_config(),
        },
        searcher={"name": "single", "metric": "loss", "max_length": {"batches": STEPS}},
        min_checkpoint_period={"batches": 2},
        scheduling_unit=1,
        resources={"slots_per_trial": slots, **resources},
    )  # fmt: skip


def execute(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def curves(farm: Farm, experiment_id: int) -> dict[str, Any]:
    logs = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.glob("*.log"))  # noqa: E731
    until(
        f"experiment {experiment_id} has ended",
        lambda: farm.client.experiment(experiment_id)["state"],
        lambda state: state in {"COMPLETED", "ERROR"},
        details=logs,
    )
    (trial,) = farm.client.trials(experiment_id)
    assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial
    curves_found = farm.client.metrics(trial["id"])
    return {curve["group"]: curve["points"] for curve in curves_found if curve["name"] == "loss"}


@pytest.mark.soak
def test_slurm_interruptions_keep_losses(farm: Farm, slurm: Cluster) -> None:
    with pytest.raises(
        ConfigError, match=r"5 rank\(s\) of 1 slot\(s\) must fit on the 2 node\(s\)"
    ):
        submit(farm, 5)
    (farm.path / "slurm.yaml").write_text(SLURM.replace("nodes: 2", "nodes: 3"))
    file = str(farm.path / "slurm.yaml")
    assert farm.spawn("large", "--resource-manager", file).wait(DEADLINE_S) == 2
    wrong = "resource_manager.nodes: must be at most 2, the nodes of partition low (sinfo), got 3"
    assert wrong in farm.log("large").read_text()

    experiment_id = submit(farm, 4, elastic={"min_slots": 2})

    def run_at(step: int, size: int) -> str:
        """Return the last run at a step if it has that many ranks; else empty."""
        file = farm.gate / f"at_{step}"
        run, ranks = file.read_text().split() if file.exists() else ("", "")
        return run if ranks == str(size) else ""

    def job_of(run: str) -> str:
        """Its job; empty when it does not run."""
        if not run:
            return ""
        name = f"zerolab-{experiment_id}-1-{run}"
        return execute("squeue", "--noheader", "--format=%i", f"--name={name}", "--states=RUNNING")

    def state_of(job: str) -> str:
        return (
            execute("scontrol", "--oneliner", "show", "job", job)
            .partition("JobState=")[2]
            .split()[0]
        )

    def holders() -> set[int | None]:
        """The runs that hold slots; None for a free one."""
        return {slot["run_id"] for agent in farm.client.agents() for slot in agent["slots"]}

    logs = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.rglob("*.log"))  # noqa: E731

    def leaves_at(step: int, cause: Callable[[str], object]) -> None:
        """Interrupt the job that waits at a step; wait until it has saved a checkpoint there."""
        hit: list[str] = []

        def job_left() -> bool:
            run = run_at(step, 4)
            if run not in {"", *hit}:  # another checkpoint, if that one was lost
                job = job_of(run)
                if job:
                    hit.append(run)
                    cause(job)
            latest = farm.client.trials(experiment_id)[0]["latest_checkpoint"]
            saved = farm.client.checkpoint(latest)["steps_completed"] if latest else 0
            return bool(hit) and saved == step + 1 and int(hit[-1]) not in holders()

        until(f"it has left at step {step}", job_left, details=logs)
        (farm.gate / f"go_{step}").touch()

    # Slurm checks time limits every 30 s: the remaining time is less than the grace period.
    limit = ["scontrol", "update", "timelimit=2"]
    leaves_at(2, lambda job: subprocess.run([*limit, f"jobid={job}"], check=False))
    leaves_at(4, lambda job: subprocess.run(["scancel", job], check=False))
    command = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    urgent: list[str] = []
    leaves_at(6, lambda _: urgent.append(execute(*command, "--output=/dev/null", "--wrap", "true")))
    for job in urgent:
        until("the urgent job is through", lambda job=job: state_of(job), "COMPLETED".__eq__)  # type: ignore[misc]
    slurm.change("KillWait", "5")  # preempted runs need no longer time from here on
    lost_job = until("the trial is at step 8", lambda: job_of(run_at(8, 4)), details=logs)
    slurm.net.cut("zls2")
    try:
        # Slurm would notice after 30 s, too (test_slurm.py waits for it).
        execute("scontrol", "update", "nodename=n2", "state=down", "reason=gone")
        # The remaining ranks block in a collective until Slurm kills them.
        until(
            "Slurm has ended the job", lambda: state_of(lost_job), "NODE_FAIL".__eq__, details=logs
        )
        until("the trial is at step 8, on the node left", lambda: run_at(8, 2), details=logs)
        begun = time.monotonic()
    finally:
        slurm.net.mend("zls2")
    subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], check=False)
    until(
        "the pool has all its slots again",
        lambda: [slot["down"] for agent in farm.client.agents() for slot in agent["slots"]],
        lambda down: down == [False] * 4,
        details=slurm.states,
    )
    until("it has run for longer than it must", time.monotonic, lambda now: now > begun + 2)
    (farm.gate / "go_8").touch()
    # At step 10, after a checkpoint, it waits until it is preempted for more slots.

    losses = curves(farm, experiment_id)["training"]
    expected = gated.losses_of_plain_torch(STEPS)
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx(expected, abs=1e-5)
    lines = [
        line["text"] for line in farm.client.experiment_logs(experiment_id, limit=1000)["logs"]
    ]
    assert any("NODE_FAIL" in text for text in lines), lines
    assert any("it saves a checkpoint and exits" in text for text in lines), lines
