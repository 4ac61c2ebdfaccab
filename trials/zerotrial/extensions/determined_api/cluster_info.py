"""Determined's ``get_cluster_info()``, from the specification of the run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerolab.contract.spec import ENV_MASTER, ENV_RUN_SPEC, read_run_spec

__all__ = ["ClusterInfo", "TrialInfo", "get_cluster_info"]


@dataclass(frozen=True)
class TrialInfo:
    """Trial of this process."""

    trial_id: int
    experiment_id: int
    trial_seed: int
    hparams: dict[str, Any]
    _config: dict[str, Any]
    """Experiment file; Determined's examples read it under this name."""
    _trial_run_id: int


@dataclass(frozen=True)
class ClusterInfo:
    """Task of this process."""

    trial: TrialInfo
    latest_checkpoint: str | None
    """Checkpoint to continue from."""
    user_data: dict[str, Any]
    """The block ``data`` of the experiment file."""
    master_url: str
    task_type: str = "TRIAL"

    @property
    def slot_ids(self) -> list[int]:
        """Slots of this machine."""
        return list(range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    @property
    def container_addrs(self) -> list[str]:
        """Addresses of the machines; only the first one is known here."""
        return [os.environ.get("MASTER_ADDR", "127.0.0.1")]

    @property
    def container_rank(self) -> int:
        """Raise an error: scripts use it to start their ranks, which run already.

        Raises:
            NotImplementedError: Always.
        """
        msg = (
            "ClusterInfo.container_rank: is not supported, because Zerolab starts one process for "
            "each slot; remove the launcher of the script, and call determined.core.init() in each"
        )
        raise NotImplementedError(msg)


def get_cluster_info() -> ClusterInfo | None:
    """Return the task of this process; None outside an experiment."""
    file = os.environ.get(ENV_RUN_SPEC)
    if not file:
        return None
    spec = read_run_spec(Path(file))
    trial = TrialInfo(
        spec.trial_id, spec.experiment_id, spec.trial_seed, spec.hparams, spec.config, spec.run_id
    )
    checkpoint = spec.latest_checkpoint
    return ClusterInfo(
        trial,
        checkpoint.uuid if checkpoint is not None else None,
        spec.config.get("data") or {},
        os.environ.get(ENV_MASTER, ""),
    )
