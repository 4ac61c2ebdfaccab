"""Real trials with checkpoints on S3: trained, killed, resumed, removed."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.model import MODEL, experiment
from tests.end_to_end.installation import Installation
from tests.extensions.storage_objects.buckets import S3
from tests.waiting import until

pytestmark = pytest.mark.processes

FROZEN = {"type": "SGD", "params": {"lr": 0.0}}

WAITING = f'''{MODEL}

import threading
from pathlib import Path


class Waiting(Line):
    """Comes to batch 13 once, and stays there until somebody ends it."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        waited = Path(self.context.get_hparam("waited"))
        if batch_idx == 13 and self.context.distributed.rank == 1 and not waited.exists():
            waited.touch()
            threading.Event().wait()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
'''


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with Installation.running(tmp_path_factory.mktemp("buckets") / "home", slots=2) as running:
        yield running


def submit(
    installation: Installation, folder: Path, storage: dict[str, Any], **changes: Any
) -> int:
    config = experiment(20, slots=2, checkpoint_storage=storage, max_restarts=1, **changes)
    config["entrypoint"] = "model_def:Waiting"
    config["hyperparameters"] |= {"waited": str(folder / "waited")}
    config["min_checkpoint_period"] = {"batches": 5}
    return installation.submit(folder / "model", config, {"model_def.py": WAITING})


def everything_shown(installation: Installation, experiment_id: int) -> str:
    """Return everything that the CLI and the client show about an experiment."""
    shown = [
        installation.quick("experiment", "describe", str(experiment_id), "--json").stdout,
        json.dumps(installation.client.experiments()),
        *installation.lines(experiment_id),
        *(path.read_text() for path in installation.home.logs.iterdir()),
    ]
    for folder in installation.home.runs.iterdir():
        shown += [path.read_text() for path in (folder / "logs").rglob("*") if path.is_file()]
    return "\n".join(shown)


def test_killed_trial_resumes_from_s3(
    installation: Installation, s3_server: S3, tmp_path: Path
) -> None:
    bucket = s3_server.bucket()
    experiment_id = submit(installation, tmp_path, s3_server.block(bucket))
    until("the trial waits", (tmp_path / "waited").exists)
    (trial,) = installation.client.trials(experiment_id)
    run_id = installation.wait_for_run(trial["id"])
    os.kill(installation.rank_pid(run_id, 1), signal.SIGKILL)
    ended = installation.wait_for(experiment_id)
    assert ended["state"] == "COMPLETED"
    lines = installation.lines(experiment_id)
    assert any("resumed after batch 10" in line for line in lines)
    (trial,) = installation.client.trials(experiment_id)
    assert (trial["steps_completed"], trial["restarts"]) == (20, 1)
    checkpoints = installation.client.experiment_checkpoints(experiment_id)
    completed = [item for item in checkpoints if item["state"] == "COMPLETED"]
    assert {item["uuid"] for item in completed} == {trial["latest_checkpoint"]}
    assert completed[0]["path"] == f"s3://{bucket}/team/checkpoints/{trial['latest_checkpoint']}"
    prefix = f"team/checkpoints/{trial['latest_checkpoint']}/"
    expected = sorted(f"{prefix}{name}" for name in (*completed[0]["resources"], "checkpoint.json"))
    until("what is not kept goes", lambda: s3_server.keys(bucket) == expected)

    shown = everything_shown(installation, experiment_id)
    assert s3_server.secret not in shown
    assert s3_server.key not in shown
    assert '"secret_key": "********"' in shown

    installation.quick("experiment", "delete", str(experiment_id), "--yes")
    until("nothing is left in the bucket", lambda: s3_server.keys(bucket) == [])


def test_warm_start_from_another_storage(
    installation: Installation, s3_server: S3, own_s3: S3, tmp_path: Path
) -> None:
    """From S3 to another S3 with other credentials, and from there to a directory."""
    directory = {"type": "directory", "container_path": str(tmp_path / "shared")}
    s3, other = s3_server.block(s3_server.bucket()), own_s3.block(own_s3.bucket())
    losses = []
    source: dict[str, Any] = {}
    for storage in (s3, other, directory):
        config = experiment(1 if source else 10, checkpoint_storage=storage)
        config["searcher"] |= source
        if source:  # the weights do not change
            config["hyperparameters"]["deepspeed_config"] |= {"optimizer": FROZEN}
        shutil.rmtree(installation.home.cache, ignore_errors=True)
        created = installation.submit(tmp_path / "line", config, {"model_def.py": MODEL})
        assert installation.wait_for(created)["state"] == "COMPLETED", installation.lines(created)
        (trial,) = installation.client.trials(created)
        losses.append(trial["best_validation"])
        source = {"source_trial_id": trial["id"]}
    assert losses == [losses[0]] * 3
