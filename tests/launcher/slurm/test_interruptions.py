"""A trial on a Slurm pool meets all that Slurm does to jobs, and ends as if nothing had been."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_two_agents import CONFIG, Farm
from tests.launcher.slurm.cluster import Cluster
from tests.waiting import DEADLINE_S, until
from zerolab.errors import ConfigError

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

STEPS = 16
GATES = (2, 4, 6, 8, 10, 14)
CURVES = (3.0, 1.0, 2.0, 0.5)
SCRIPT = f"""
import json, pathlib, time
import zerolab.core
with zerolab.core.init() as context:
    ranks, train = context.distributed, context.train
    gate = pathlib.Path(GATE)
    curves, x, v, step = {CURVES}, [1.0, -0.7, 0.4, 2.0], [0.0] * 4, 0
    if train.latest_checkpoint:
        with context.checkpoint.restore_path(train.latest_checkpoint.uuid) as path:
            x, v, step = json.loads((path / "state").read_text())
    leaves = False
    while step < {STEPS} and not leaves:
        step += 1
        mine = {{n: curves[n] * x[n] for n in range(ranks.rank, 4, ranks.size)}}
        gradient = {{n: each for part in ranks.allgather(mine) for n, each in part.items()}}
        v = [0.7 * v[n] + gradient[n] for n in range(4)]
        x = [x[n] - 0.1 * v[n] for n in range(4)]
        loss = sum(0.5 * curves[n] * x[n] ** 2 for n in range(4))
        if ranks.is_chief:
            train.report_training_metrics(step, {{"loss": loss}})
        leaves = context.preempt.should_preempt()
        waits = step in {GATES}
        if waits and ranks.is_chief:
            (gate / "now").write_text(f"{{train.info.run_id}} {{ranks.size}}")
            (gate / "now").rename(gate / f"at_{{step}}")
        while waits and not leaves and not ranks.broadcast((gate / f"go_{{step}}").exists()):
            time.sleep(0.05)
            leaves = context.preempt.should_preempt()
        if ranks.is_chief and (leaves or step % 4 == 0):
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
  slots_per_node: 2
  grace_s: 50
  sbatch_args: [--time=30]
"""


def undisturbed() -> list[list[float]]:
    """The losses of one process that nothing befalls."""
    x, v, found = [1.0, -0.7, 0.4, 2.0], [0.0] * 4, []
    for step in range(1, STEPS + 1):
        v = [0.7 * v[n] + CURVES[n] * x[n] for n in range(4)]
        x = [x[n] - 0.1 * v[n] for n in range(4)]
        found.append([step, sum(0.5 * CURVES[n] * x[n] ** 2 for n in range(4))])
    return found


@pytest.fixture
def farm(slurm: Cluster, tmp_path: Path) -> Iterator[Farm]:
    made = Farm(tmp_path, 60.0, "--allow-remote", "--grow-after", "1", host=slurm.net.host)
    made.script = SCRIPT
    try:
        (tmp_path / "slurm.yaml").write_text(SLURM)
        made.join("slurm", "--resource-manager", str(tmp_path / "slurm.yaml"))
        yield made
    finally:
        made.close()


def submit(farm: Farm, **resources: Any) -> int:
    searcher = {**CONFIG["searcher"], "max_length": {"batches": STEPS}}
    return farm.submit(searcher=searcher, resources=resources)


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


def test_time_limit_scancel_preemption_and_lost_node_change_no_loss_and_count_as_no_failure(
    farm: Farm, slurm: Cluster
) -> None:
    with pytest.raises(
        ConfigError, match=r"5 rank\(s\) of 1 slot\(s\) must fit on the 2 node\(s\)"
    ):
        submit(farm, slots_per_trial=5)
    (farm.path / "slurm.yaml").write_text(SLURM.replace("nodes: 2", "nodes: 3"))
    file = str(farm.path / "slurm.yaml")
    assert farm.spawn("large", "--resource-manager", file).wait(DEADLINE_S) == 2
    told = "resource_manager.nodes: must be at most 2, the nodes of partition low (sinfo), got 3"
    assert told in farm.log("large").read_text()

    one = submit(farm, slots_per_trial=4, elastic={"min_slots": 2})

    def run_at(step: int) -> str:
        """The last run that has come to a step; empty when none has."""
        file = farm.gate / f"at_{step}"
        return file.read_text().split()[0] if file.exists() else ""

    def job_of(run: str) -> str:
        """Its job; empty when it does not run."""
        name = f"zerolab-{one}-1-{run}"
        return said("squeue", "--noheader", "--format=%i", f"--name={name}", "--states=RUNNING")

    told = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.rglob("*.log"))  # noqa: E731
    hit: list[str] = []

    def leaves_at(step: int, cause: Callable[[str], object]) -> None:
        """Do something to the job that stands at a step; wait until it has saved that and left."""

        def stopped_at() -> int:
            run = run_at(step)
            if run and run not in hit:  # another one, if that was lost for a reason of its own
                hit.append(run)
                cause(job_of(run))
            latest = farm.client.trials(one)[0]["latest_checkpoint"]
            return farm.client.checkpoint(latest)["steps_completed"] if latest else 0

        until(f"it has left at step {step}", stopped_at, lambda at: at == step, told=told)
        (farm.gate / f"go_{step}").touch()

    minute = ["scontrol", "update", "timelimit=1"]
    leaves_at(2, lambda job: subprocess.run([*minute, f"jobid={job}"], check=False))
    leaves_at(4, lambda job: subprocess.run(["scancel", job], check=False))
    words = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    urgent: list[str] = []
    leaves_at(6, lambda _: urgent.append(said(*words, "--output=/dev/null", "--wrap", "true")))
    lost = until("the trial is at step 8", lambda: job_of(run_at(8)), told=told)
    states = said("scontrol", "--oneliner", "show", "job", urgent[0])
    assert "JobState=COMPLETED" in states, states
    sizes = {(farm.gate / f"at_{step}").read_text().split()[1] for step in (2, 4, 6, 8)}
    assert "4" in sizes, sizes
    slurm.net.cut("zls2")
    try:
        until(
            "Slurm has lost the node",
            lambda: said("scontrol", "--oneliner", "show", "job", lost),
            lambda text: "JobState=NODE_FAIL" in text,
        )
        (farm.gate / "go_8").touch()
        until("the trial is at step 10", lambda: run_at(10), told=told)
        (_, size) = (farm.gate / "at_10").read_text().split()
        assert size == "2"  # on the node that is left
    finally:
        slurm.net.mend("zls2")
    until(
        "the pool has all its slots again",
        lambda: [slot["down"] for agent in farm.client.agents() for slot in agent["slots"]],
        lambda down: down == [False] * 4,
        told=slurm.states,
    )
    (farm.gate / "go_10").touch()
    until(
        "it has grown back, at the checkpoint of step 12",
        lambda: [slot["run_id"] for agent in farm.client.agents() for slot in agent["slots"]],
        lambda runs: None not in runs and len(set(runs)) == 1,
        told=lambda: said("scontrol", "show", "job"),
    )
    (farm.gate / "go_14").touch()

    assert curves(farm, one)["training"] == undisturbed()
    lines = [line["text"] for line in farm.client.experiment_logs(one, limit=1000)["logs"]]
    assert any("NODE_FAIL" in text for text in lines), lines
    assert any("it leaves with its checkpoint" in text for text in lines), lines
