"""Saved checkpoints of a run: validation, storage, and update of the best one."""

import uuid

import msgspec
from sqlalchemy import RowMapping, select

from zerolab.contract.messages import CheckpointRecord
from zerolab.contract.names import resources_problem
from zerolab.errors import ConfigError
from zeroserver.orchestrator.checkpoints.best import best_checkpoints
from zeroserver.orchestrator.cluster.elastic_growth import grow
from zeroserver.orchestrator.ingest.sender import Reporting
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import settle_sources
from zeroserver.store.points import MAX_STEP
from zeroserver.store.schema import checkpoints, trials

__all__ = ["check_checkpoint", "choose_best_checkpoint", "note_checkpoint"]


def check_checkpoint(record: CheckpointRecord) -> None:
    """Refuse a checkpoint that cannot be.

    Raises:
        ConfigError: If its uuid is none, its steps are not 0 to 2^53, or a file of it has an
            invalid name or size.
    """
    try:
        canonical = str(uuid.UUID(record.uuid)) == record.uuid
    except ValueError:
        canonical = False
    if not canonical or not 0 <= record.steps_completed < MAX_STEP:
        got = f"{record.uuid[:50]!r} and {record.steps_completed}"
        problem = f"uuid, steps_completed: must be a lower-case uuid and at least 0, got {got}"
        raise ConfigError("checkpoint", [problem])
    if wrong := resources_problem(record.resources):
        raise ConfigError("checkpoint", [f"resources: {wrong}"])


def note_checkpoint(work: UnitOfWork, run: Reporting, record: CheckpointRecord) -> bool:
    """Note a checkpoint; return whether a trial has waited for it.

    Raises:
        ConfigError: If the checkpoint is another trial's.
    """
    known = select(checkpoints.c.trial_id).where(checkpoints.c.uuid == record.uuid)
    owner = work.connection.scalar(known)
    if owner is not None and owner != run["trial_id"]:
        problem = f"uuid: {record.uuid} is another trial's; report each under a new uuid"
        raise ConfigError("checkpoint", [problem])
    if owner is not None:
        return False
    address = work.storage_of(run["experiment_id"])
    row = {
        "uuid": record.uuid,
        "trial_id": run["trial_id"],
        "experiment_id": run["experiment_id"],
        "run_id": run["id"],
        "steps_completed": record.steps_completed,
        "state": "COMPLETED",
        "size_bytes": sum(record.resources.values()),
        "resources": msgspec.json.encode(record.resources).decode(),
        "metadata": msgspec.json.encode(record.metadata).decode(),
        "path": address.at(record.uuid),
        "created_at": record.time,
    }
    work.connection.execute(checkpoints.insert().values(row))
    work.save(trials, run["trial_id"], latest_checkpoint=record.uuid)
    work.touch("checkpoint", run["experiment_id"], record.uuid)
    grow(work, run["id"], record.steps_completed)
    return settle_sources(work, run["trial_id"])


def choose_best_checkpoint(work: UnitOfWork, experiment: RowMapping, trial_id: int) -> None:
    """Name the checkpoint of a trial whose own validation is the best."""
    if not experiment["metric"]:
        return
    mine = checkpoints.c.trial_id == trial_id
    row = work.connection.execute(best_checkpoints(experiment).where(mine).limit(1)).first()
    if row is not None:
        work.save(trials, trial_id, best_checkpoint=row.uuid)
