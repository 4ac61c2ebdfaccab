"""A complete cluster: PostgreSQL, two agents, a Slurm pool, and twelve experiments."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.test_two_agents import CONFIG, Farm
from tests.extensions.launcher_slurm.cluster import Cluster
from tests.server.conftest import new_database
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.machines, pytest.mark.slow]

STEPS = 4
SCRIPT = f"""
import os, pathlib, time
import zerolab.core
assert "ZEROLAB_TOKEN" not in os.environ  # the agent had its token there
with zerolab.core.init() as context:
    ranks, train = context.distributed, context.train
    gate = pathlib.Path(GATE)
    step = 0
    if train.latest_checkpoint:
        with context.checkpoint.restore_path(train.latest_checkpoint.uuid) as path:
            step = int((path / "state").read_text())
    leaves = False
    while step < {STEPS} and not leaves:
        step += 1
        print(f"rank {{ranks.rank}} step {{step}}", flush=True)
        if ranks.is_chief:
            train.report_training_metrics(step, {{"loss": 1 / step}})
            (gate / f"begun_{{train.info.run_id}}").touch()
        leaves = context.preempt.should_preempt()
        waits = context.info.config["data"]["waits"]
        while waits and not leaves and not ranks.broadcast((gate / "go").exists()):
            time.sleep(0.05)
            leaves = context.preempt.should_preempt()
        if ranks.is_chief and (leaves or step == {STEPS}):
            with context.checkpoint.store_path({{"steps_completed": step}}) as (path, _):
                (path / "state").write_text(str(step))
    if step == {STEPS} and ranks.is_chief:
        train.report_validation_metrics(step, {{"loss": 1 / step}})
"""
SLURM = """
resource_manager:
  type: slurm
  nodes: 2
  slots_per_node: 2
  grace_s: 30
"""


@pytest.fixture
def farm(slurm: Cluster, postgresql: Any, tmp_path: Path) -> Iterator[Farm]:
    database = new_database(postgresql)
    host = ["--database", database, "--allow-remote"]
    created = Farm(tmp_path, 300.0, *host, host=slurm.net.host)
    created.script = SCRIPT
    try:
        (tmp_path / "slurm.yaml").write_text(SLURM)
        created.join("one", "--slots", "2")
        created.join("two", "--slots", "2")
        created.join(
            "slurm", "--resource-manager", str(tmp_path / "slurm.yaml"), "--pool", "cluster"
        )
        yield created
    finally:
        created.close()


def submit(farm: Farm, *, waits: bool, trials: int = 1, **resources: Any) -> int:
    searcher = {**CONFIG["searcher"], "name": "random", "max_trials": trials}
    searcher["max_length"] = {"batches": STEPS}
    return farm.submit(searcher=searcher, resources=resources, data={"waits": waits})


@pytest.mark.soak
def test_mixed_priorities_on_agents_and_slurm(
    farm: Farm,
) -> None:
    pool = {"resource_pool": "cluster"}
    # These use all slots, and wait to be preempted.
    ids = [submit(farm, waits=True, priority=60 + number) for number in range(4)]
    ids.append(submit(farm, waits=True, priority=60, slots_per_trial=2, **pool))
    logs = lambda: "\n".join(log.read_text()[-3000:] for log in farm.path.glob("*.log"))  # noqa: E731
    until(
        "they train", lambda: len(list(farm.gate.glob("begun_*"))), lambda n: n == 5, details=logs
    )
    ids.append(submit(farm, waits=False, priority=5, slots_per_trial=4, **pool))
    ids.append(submit(farm, waits=False, priority=70, slots_per_trial=1, **pool))
    ids.append(submit(farm, waits=False, priority=10, slots_per_trial=3, max_nodes=2))
    ids.append(submit(farm, waits=False, priority=20, trials=3))
    for number in range(3):
        slots = 2 if number == 0 else 1
        ids.append(submit(farm, waits=False, priority=15 + 25 * number, slots_per_trial=slots))
    assert len(ids) == 12
    driven_away = [
        ids[3],
        ids[4],
    ]  # the lowest priority of the agents' pool, and the only one of Slurm
    until(
        "two have saved a checkpoint and left",
        lambda: [
            farm.client.trials(experiment_id)[0]["latest_checkpoint"]
            for experiment_id in driven_away
        ],
        all,
        details=logs,
    )
    (farm.gate / "go").touch()
    until(
        "all have ended",
        lambda: Counter(farm.client.experiment(experiment_id)["state"] for experiment_id in ids),
        lambda states: states["COMPLETED"] + states["ERROR"] == 12,
        details=logs,
    )
    for experiment_id in ids:
        check(farm, experiment_id)
    latest = {
        row["uuid"]
        for experiment_id in ids
        for row in farm.client.experiment_checkpoints(experiment_id)
        if row["state"] == "COMPLETED"
    }
    stored = farm.server.home / "checkpoints"
    until(
        "what is not kept goes",
        lambda: {path.name for path in stored.iterdir() if not path.name.startswith(".")},
        latest.__eq__,
    )
    assert all(
        slot["run_id"] is None
        for experiment_id in farm.client.agents()
        for slot in experiment_id["slots"]
    )


def check(farm: Farm, experiment_id: int) -> None:
    """Check that an experiment has every metric, checkpoint and log line exactly once."""
    experiment = farm.client.experiment(experiment_id)
    assert experiment["state"] == "COMPLETED", experiment["error"]
    trials = farm.client.trials(experiment_id)
    lines = farm.client.experiment_logs(experiment_id, limit=1000)["logs"]
    texts = Counter(line["text"] for line in lines if line["text"].startswith("rank"))
    ranks = experiment["config"]["resources"]["slots_per_trial"]
    steps = range(1, STEPS + 1)
    expected = {f"rank {rank} step {step}" for rank in range(ranks) for step in steps}
    assert texts == Counter(dict.fromkeys(expected, len(trials))), (experiment_id, texts)
    assert len(trials) == experiment["config"]["searcher"]["max_trials"]
    for trial in trials:
        assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), trial
        curves = {
            (curve["group"], curve["name"]): curve["points"]
            for curve in farm.client.metrics(trial["id"])
            if curve["group"] != "system"
        }
        assert curves["training", "loss"] == [[step, 1 / step] for step in steps]
        assert curves["validation", "loss"] == [[STEPS, 1 / STEPS]]
        saved = b"".join(farm.client.checkpoint_file(trial["latest_checkpoint"], "state"))
        assert saved == str(STEPS).encode()
