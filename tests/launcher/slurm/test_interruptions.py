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

STEPS = 12
GATES = (2, 4, 6, 8, 10)
CURVES = (3.0, 1.0, 2.0, 0.5)
# At a gate the trial stands until the test lets it on, in as many runs as that takes. One on fewer
# slots than planned saves there again and again, and so takes the others whenever they are free.
SCRIPT = f"""
import json, os, pathlib, threading, time
import zerolab.core

gate = pathlib.Path(GATE)

def die_with_the_lost_node(run):  # as a collective does that has waited for too long
    while not (gate / f"lost_{{run}}").exists():
        time.sleep(0.2)
    os._exit(1)

with zerolab.core.init() as context:
    ranks, train = context.distributed, context.train
    run = train.info.run_id
    threading.Thread(target=die_with_the_lost_node, args=(run,), daemon=True).start()
    curves, x, v, step, loss = {CURVES}, [1.0, -0.7, 0.4, 2.0], [0.0] * 4, 0, 0.0
    if train.latest_checkpoint:
        with context.checkpoint.restore_path(train.latest_checkpoint.uuid) as path:
            x, v, step, loss = json.loads((path / "state").read_text())

    def save():
        if ranks.is_chief:
            with context.checkpoint.store_path({{"steps_completed": step}}) as (path, _):
                (path / "state").write_text(json.dumps([x, v, step, loss]))

    leaves = False
    while True:
        if step in {GATES} and ranks.is_chief:
            (gate / "now").write_text(f"{{run}} {{ranks.size}}")
            (gate / "now").rename(gate / f"at_{{step}}")
        looks = 0
        while step in {GATES} and not leaves:
            if ranks.broadcast((gate / f"go_{{step}}").exists()):
                break
            looks += 1
            if ranks.size < 4 and looks % 40 == 0:
                save()
            time.sleep(0.05)
            leaves = context.preempt.should_preempt()
        if leaves or step == {STEPS}:
            break
        step += 1
        mine = {{n: curves[n] * x[n] for n in range(ranks.rank, 4, ranks.size)}}
        gradient = {{n: each for part in ranks.allgather(mine) for n, each in part.items()}}
        v = [0.7 * v[n] + gradient[n] for n in range(4)]
        x = [x[n] - 0.1 * v[n] for n in range(4)]
        loss = sum(0.5 * curves[n] * x[n] ** 2 for n in range(4))
        if ranks.is_chief:
            train.report_training_metrics(step, {{"loss": loss}})
        leaves = context.preempt.should_preempt()
    save()
    if step == {STEPS} and ranks.is_chief:
        train.report_validation_metrics(step, {{"loss": loss}})
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
    made = Farm(tmp_path, 300.0, "--allow-remote", "--grow-after", "1", host=slurm.net.host)
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
    wrong = "resource_manager.nodes: must be at most 2, the nodes of partition low (sinfo), got 3"
    assert wrong in farm.log("large").read_text()

    one = submit(farm, slots_per_trial=4, elastic={"min_slots": 2})

    def run_at(step: int, size: int) -> str:
        """The last run that has come to a step, if it has so many ranks; else empty."""
        file = farm.gate / f"at_{step}"
        run, ranks = file.read_text().split() if file.exists() else ("", "")
        return run if ranks == str(size) else ""

    def job_of(run: str) -> str:
        """Its job; empty when it does not run."""
        if not run:
            return ""
        name = f"zerolab-{one}-1-{run}"
        return said("squeue", "--noheader", "--format=%i", f"--name={name}", "--states=RUNNING")

    def state_of(job: str) -> str:
        return (
            said("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]
        )

    def holders() -> set[int | None]:
        """The runs that hold slots; None for a free one."""
        return {slot["run_id"] for agent in farm.client.agents() for slot in agent["slots"]}

    told = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.rglob("*.log"))  # noqa: E731

    def leaves_at(step: int, cause: Callable[[str], object]) -> None:
        """Do something to the job that stands at a step; wait until it has saved that and left."""
        hit: list[str] = []

        def left() -> bool:
            run = run_at(step, 4)
            if run not in {"", *hit}:  # another one, if that was lost for a reason of its own
                job = job_of(run)
                if job:
                    hit.append(run)
                    cause(job)
            latest = farm.client.trials(one)[0]["latest_checkpoint"]
            saved = farm.client.checkpoint(latest)["steps_completed"] if latest else 0
            return bool(hit) and saved == step and int(hit[-1]) not in holders()

        until(f"it has left at step {step}", left, told=told)
        (farm.gate / f"go_{step}").touch()

    # Slurm looks at time limits every 30 s: what is left after this one is less than the grace.
    limit = ["scontrol", "update", "timelimit=2"]
    leaves_at(2, lambda job: subprocess.run([*limit, f"jobid={job}"], check=False))
    leaves_at(4, lambda job: subprocess.run(["scancel", job], check=False))
    words = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
    urgent: list[str] = []
    leaves_at(6, lambda _: urgent.append(said(*words, "--output=/dev/null", "--wrap", "true")))
    for job in urgent:
        until("the urgent job is through", lambda job=job: state_of(job), "COMPLETED".__eq__)  # type: ignore[misc]
    run, lost = until(
        "the trial is at step 8",
        lambda: (run_at(8, 4), job_of(run_at(8, 4))),
        lambda found: all(found) and found[1] == job_of(found[0]),
        told=told,
    )
    slurm.net.cut("zls2")
    try:
        # Slurm would find that out, too, after half a minute (test_slurm.py waits for it).
        said("scontrol", "update", "nodename=n2", "state=down", "reason=gone")
        until("Slurm has lost the node", lambda: state_of(lost), lambda state: state != "RUNNING")
        (farm.gate / f"lost_{run}").touch()
        until("the job has ended", lambda: state_of(lost), "NODE_FAIL".__eq__)
        (farm.gate / "go_8").touch()
        until("the trial is at step 10, on the node left", lambda: run_at(10, 2), told=told)
    finally:
        slurm.net.mend("zls2")
    subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], check=False)
    until(
        "the pool has all its slots again",
        lambda: [slot["down"] for agent in farm.client.agents() for slot in agent["slots"]],
        lambda down: down == [False] * 4,
        told=slurm.states,
    )
    until("it has grown back", lambda: run_at(10, 4), told=told)
    (farm.gate / "go_10").touch()

    assert curves(farm, one)["training"] == undisturbed()
    lines = [line["text"] for line in farm.client.experiment_logs(one, limit=1000)["logs"]]
    assert any("NODE_FAIL" in text for text in lines), lines
    assert any("it leaves with its checkpoint" in text for text in lines), lines
