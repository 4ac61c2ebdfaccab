"""A trial on a Slurm pool meets all that Slurm does to jobs, and ends as if nothing had been."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_two_agents import CONFIG, Farm
from tests.launcher.slurm.cluster import Cluster
from tests.waiting import DEADLINE_S, until
from zerolab.errors import ConfigError

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

STEPS = 12
SCRIPT = f"""
import json, pathlib, time
import zerolab.core
with zerolab.core.init() as context:
    ranks, train = context.distributed, context.train
    gate = pathlib.Path(GATE)
    x, v, step = [1.0, -0.7], [0.0, 0.0], 0
    if train.latest_checkpoint:
        with context.checkpoint.restore_path(train.latest_checkpoint.uuid) as path:
            x, v, step = json.loads((path / "state").read_text())
    leaves = False
    while step < {STEPS} and not leaves:
        step += 1
        gradient = ranks.allgather((3.0, 1.0)[ranks.rank] * x[ranks.rank])
        v = [0.7 * a + b for a, b in zip(v, gradient)]
        x = [a - 0.1 * b for a, b in zip(x, v)]
        loss = 1.5 * x[0] ** 2 + 0.5 * x[1] ** 2
        if ranks.is_chief:
            train.report_training_metrics(step, {{"loss": loss}})
        leaves = context.preempt.should_preempt()
        waits = context.info.config["data"]["waits"] and step in (3, 6, 9)
        if waits and ranks.is_chief:
            (gate / f"at_{{step}}").write_text(str(train.info.run_id))
        while waits and not leaves and not ranks.broadcast((gate / f"go_{{step}}").exists()):
            time.sleep(0.05)
            leaves = context.preempt.should_preempt()
        if ranks.is_chief and (leaves or step % 4 == 0 or step == {STEPS}):
            with context.checkpoint.store_path({{"steps_completed": step}}) as (path, _):
                (path / "state").write_text(json.dumps([x, v, step]))
    if step == {STEPS} and ranks.is_chief:
        train.report_validation_metrics(step, {{"loss": loss}})
"""
SLURM = """
resource_manager:
  type: slurm
  partition: low
  nodes: 2
  slots_per_node: 1
  grace_s: 30
  sbatch_args: [--time=30]
"""


@pytest.fixture
def farm(slurm: Cluster, tmp_path: Path) -> Iterator[Farm]:
    made = Farm(tmp_path, 60.0, "--allow-remote", host=slurm.net.host)
    made.script = SCRIPT
    try:
        (tmp_path / "slurm.yaml").write_text(SLURM)
        made.join("slurm", "--resource-manager", str(tmp_path / "slurm.yaml"))
        yield made
    finally:
        made.close()


def submit(farm: Farm, *, waits: bool, slots: int = 2) -> int:
    searcher = {**CONFIG["searcher"], "max_length": {"batches": STEPS}}
    return farm.submit(
        searcher=searcher, resources={"slots_per_trial": slots}, data={"waits": waits}
    )


def said(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def curves(farm: Farm, experiment_id: int) -> dict[str, Any]:
    told = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.glob("*.log"))  # noqa: E731
    until(
        f"experiment {experiment_id} has ended",
        lambda: farm.client.experiment(experiment_id)["state"],
        lambda state: state in {"COMPLETED", "ERROR"},
        told=told,
    )
    (trial,) = farm.client.trials(experiment_id)
    assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial
    found = farm.client.metrics(trial["id"])
    return {curve["group"]: curve["points"] for curve in found if curve["name"] == "loss"}


def test_a_time_limit_a_preemption_and_a_lost_node_change_no_loss_and_count_as_no_failure(
    farm: Farm, slurm: Cluster
) -> None:
    with pytest.raises(
        ConfigError, match=r"3 rank\(s\) of 1 slot\(s\) must fit on the 2 node\(s\)"
    ):
        submit(farm, waits=True, slots=3)
    (farm.path / "slurm.yaml").write_text(SLURM.replace("nodes: 2", "nodes: 3"))
    file = str(farm.path / "slurm.yaml")
    assert farm.spawn("large", "--resource-manager", file).wait(DEADLINE_S) == 2
    told = "resource_manager.nodes: must be at most 2, the nodes of partition low (sinfo), got 3"
    assert told in farm.log("large").read_text()

    one = submit(farm, waits=True)

    def job_at(step: int) -> str:
        """Wait until the trial stands at a step; return the job in which it does."""
        file = farm.gate / f"at_{step}"
        until(
            f"the trial is at step {step}",
            lambda: file.exists() and file.read_text(),
            told=lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.rglob("*.log")),
        )
        name = f"zerolab-{one}-1-{file.read_text()}"
        return said("squeue", "--noheader", "--format=%i", f"--name={name}", "--states=RUNNING")

    def left_at(step: int) -> None:
        """Wait until the run has saved what it had, and left; let the next one pass."""
        until(
            f"it has left at step {step}",
            lambda: farm.client.trials(one)[0],
            lambda trial: (
                trial["latest_checkpoint"] is not None
                and farm.client.checkpoint(trial["latest_checkpoint"])["steps_completed"] == step
            ),
            told=lambda: said("scontrol", "show", "job"),
        )
        (farm.gate / f"go_{step}").touch()

    said("scontrol", "update", f"jobid={job_at(3)}", "timelimit=1")
    left_at(3)
    job_at(6)
    urgent = said(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap",
        "true",
    )
    left_at(6)
    lost = job_at(9)
    states = said("scontrol", "--oneliner", "show", "job", urgent)
    assert "JobState=COMPLETED" in states, states
    slurm.net.cut("zls2")
    until(
        "Slurm has lost the node",
        lambda: said("scontrol", "--oneliner", "show", "job", lost),
        lambda text: "JobState=NODE_FAIL" in text,
    )
    slurm.net.mend("zls2")
    (farm.gate / "go_9").touch()
    disturbed = curves(farm, one)

    assert disturbed == curves(farm, submit(farm, waits=False))
    assert [step for step, _ in disturbed["training"]] == list(range(1, STEPS + 1))
    texts = [line["text"] for line in farm.client.experiment_logs(one, limit=1000)["logs"]]
    assert any("NODE_FAIL" in text for text in texts), texts
