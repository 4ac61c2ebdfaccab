"""Run specifications and addresses for tests of the client and the Core API."""

from pathlib import Path
from typing import Any

from zerolab.contract.spec import RunSpec


def make_spec(directory: Path, **changes: Any) -> RunSpec:
    """Return a run in ``directory``, without a server unless ``master`` names one."""
    fields: dict[str, Any] = {
        "experiment_id": 1,
        "trial_id": 1,
        "run_id": 1,
        "config": {"name": "test"},
        "hparams": {},
        "trial_seed": 7,
        "slots": 1,
        "model_dir": str(directory),
        "run_dir": str(directory),
        "checkpoint_dir": str(directory / "checkpoints"),
    }
    return RunSpec(**fields | changes)


def closed_port() -> str:
    """Return an address without a server: port 1 on loopback is unused."""
    return "http://127.0.0.1:1"
