"""Server for the examples of ``zerolab.Client``: one finished experiment, and two that wait."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.end_to_end.installation import Installation
from zerolab.contract.spec import ENV_HOME

SCRIPT = """
import zerolab.core

with zerolab.core.init() as context:
    lr = context.train.get_hparams()["lr"]
    for step in range(1, 11):
        context.train.report_training_metrics(step, {"loss": lr / step})
    context.train.report_image("sample", [[0, 255], [255, 0]], 10)
    print("trained 10 batches")
    context.train.report_validation_metrics(10, {"loss": lr / 10})
    with context.checkpoint.store_path({"steps_completed": 10}) as (path, uuid):
        (path / "model.txt").write_text("weights")
"""

CONFIG: dict[str, Any] = {
    "name": "digits",
    "entrypoint": "python train.py",
    "hyperparameters": {"lr": {"type": "categorical", "vals": [0.1, 0.2]}},
    "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 10}},
    "checkpoint_storage": {"save_trial_best": 1},
}


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """Run a server whose clients are made by ``Client()``, with the folder as current directory."""
    with Installation.running(folder / "home") as installation:
        (folder / "model").mkdir()
        (folder / "model" / "train.py").write_text(SCRIPT)
        installation.client.create_experiment(CONFIG, folder / "model")
        installation.wait_for(1)
        agent = installation.client.agents()[0]["id"]
        installation.client.agent_action(agent, "disable")  # later experiments wait
        for name in ("waiting", "waiting longer"):
            installation.client.create_experiment({**CONFIG, "name": name}, folder / "model")
        environment = mock.patch.dict(os.environ, {ENV_HOME: str(installation.home.path)})
        with environment, contextlib.chdir(folder):
            yield
