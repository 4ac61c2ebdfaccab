"""Core API script as the entrypoint of a served experiment, on two ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.installation import Installation
from tests.waiting import until
from zerolab.storage.store import CheckpointStore

SCRIPT = """
import sys, time
import zerolab.core

with zerolab.core.init() as context:
    rank, latest = context.distributed.rank, context.train.latest_checkpoint
    steps = context.train.get_hparams()["steps"]
    start = 0
    if latest:
        with context.checkpoint.restore_path(latest.uuid) as path:
            start = int((path / f"rank_{rank}").read_text())
    for step in range(start + 1, steps + 1):
        context.train.report_training_metrics(step, {"loss": 1 / step, "rank": rank})
        leave = context.preempt.should_preempt()
        while step == 40 and not leave:  # paused here by the test
            time.sleep(0.01)
            leave = context.preempt.should_preempt()
        if step == steps:
            context.train.report_validation_metrics(step, {"accuracy": 0.5})
        if leave or step == steps:
            metadata = {"steps_completed": step}
            with context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
                (path / f"rank_{rank}").write_text(str(step))
            break
    while rank == 0 and step == steps and not context._machines.sampled:
        time.sleep(0.01)
    assert "torch" not in sys.modules
"""

CONFIG = {
    "name": "core",
    "entrypoint": "python train.py",
    "hyperparameters": {"steps": 100},
    "searcher": {"name": "single", "metric": "accuracy", "max_length": {"batches": 100}},
    "resources": {"slots_per_trial": 2},
}


@pytest.mark.processes
def test_paused_script_resumes_from_sharded_checkpoint(
    tmp_path: Path,
) -> None:
    with Installation.running(tmp_path / "home", slots=2) as installation:
        client = installation.client
        number = installation.submit(tmp_path / "model", CONFIG, {"train.py": SCRIPT})
        (trial,) = client.trials(number)

        def read_trial() -> dict[str, Any]:
            return client.trial(trial["id"])

        until("the script waits", read_trial, lambda seen: seen["steps_completed"] == 40)
        client.experiment_action(number, "pause")
        until("it is paused", read_trial, lambda seen: seen["state"] == "PAUSED")
        (checkpoint,) = client.trial_checkpoints(trial["id"])
        assert checkpoint["steps_completed"] == 40
        assert checkpoint["resources"] == {"rank_0": 2, "rank_1": 2}
        assert client.trial(trial["id"])["restarts"] == 0

        client.experiment_action(number, "activate")
        ended = installation.wait_for(number)
        assert ended["state"] == "COMPLETED", installation.lines(number)[-30:]
        curves = {c["name"]: c["points"] for c in client.metrics(trial["id"], "training")}
        assert curves["loss"] == [[step, 1 / step] for step in range(1, 101)]
        assert {value for _, value in curves["rank"]} == {0}
        system = {c["name"]: c["points"] for c in client.metrics(trial["id"], "system")}
        assert {"cpu_percent", "memory_percent", "process_memory_bytes"} <= system.keys()
        assert system["process_memory_bytes"][-1][0] == 100
        assert system["process_memory_bytes"][-1][1] > 1 << 20
        assert ended["best_validation"] == 0.5
        store = CheckpointStore(Path(checkpoint["path"]).parent)
        latest = store.latest()
        assert latest is not None
        assert latest.steps_completed == 100
        assert latest.uuid == client.trial(trial["id"])["latest_checkpoint"]
