"""Routes of checkpoints (list, read, download, remove), and a storage check."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import Depends, Query
from fastapi.responses import StreamingResponse
from sqlalchemy import ColumnElement, Connection, func, select
from starlette.concurrency import run_in_threadpool

from zerolab.contract.messages import wire_number
from zerolab.contract.names import file_name_problem
from zerolab.errors import ConfigError, ConflictError, NotFoundError, StorageError
from zeroserver.analysis.missing_result import missing_checkpoint
from zeroserver.api import queries
from zeroserver.api.common import FILE_ANSWER, After, IdPath, Limit
from zeroserver.api.queries import PageRequest
from zeroserver.api.resources import (
    BestCheckpoint,
    BestCheckpointAnswer,
    CheckpointAnswer,
    CheckpointPage,
)
from zeroserver.api.strict_route import resource_router
from zeroserver.orchestrator.checkpoints.best import best_checkpoints
from zeroserver.orchestrator.state import stored_address
from zeroserver.services import Services, ServicesDep
from zeroserver.states import TRIAL_ENDED
from zeroserver.store.rows import CheckpointRow, ExperimentRow, Row, TrialRow, find_row
from zeroserver.store.schema import checkpoints
from zeroserver.store.short_uuids import full_uuid

if TYPE_CHECKING:  # imports pydantic models and fsspec
    from zerolab.config.experiment.storage import CheckpointStorageConfig
    from zerolab.storage.store import CheckpointStore

__all__ = ["check_storage", "open_store", "router", "stored_rows"]

logger = logging.getLogger(__name__)

router = resource_router("/api/v1", "checkpoints")

CheckpointState = Literal["COMPLETED", "PARTIAL", "DELETED", "ERROR"]
_STORED_STATES = ("COMPLETED", "PARTIAL")


async def _list_filters(
    state: CheckpointState | None = None, after: After = None, limit: Limit = 100
) -> tuple[CheckpointState | None, PageRequest]:
    return state, PageRequest("id", after, limit)


ListFilters = Annotated[tuple[CheckpointState | None, PageRequest], Depends(_list_filters)]
"""State filter and page of a list of checkpoints."""


def _page(
    connection: Connection, owners: type[Row], owner_id: int, selection: ListFilters
) -> CheckpointPage:
    state, page_request = selection
    owned = queries.owned(connection, checkpoints, owners, owner_id)
    query = select(checkpoints).where(owned)
    if state is not None:
        query = query.where(checkpoints.c.state == state)
    rows, next_after = queries.page(connection, CheckpointRow, query, page_request)
    items = queries.checkpoint_list(connection, rows)
    totals = select(func.count(), func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).where(
        owned, checkpoints.c.state.in_(_STORED_STATES)
    )
    count, size = connection.execute(totals).one()
    return CheckpointPage(items, next_after, int(count), int(size))


@router.get("/experiments/{experiment_id}/checkpoints")
async def list_experiment_checkpoints(
    services: ServicesDep, experiment_id: IdPath, selection: ListFilters
) -> CheckpointPage:
    """List an experiment's checkpoints, oldest first."""
    return await services.read(
        lambda connection: _page(connection, ExperimentRow, experiment_id, selection)
    )


@router.get("/trials/{trial_id}/checkpoints")
async def list_trial_checkpoints(
    services: ServicesDep, trial_id: IdPath, selection: ListFilters
) -> CheckpointPage:
    """List a trial's checkpoints, oldest first."""
    return await services.read(lambda connection: _page(connection, TrialRow, trial_id, selection))


@router.get("/experiments/{experiment_id}/best-checkpoint")
async def get_experiment_best_checkpoint(
    services: ServicesDep, experiment_id: IdPath
) -> BestCheckpointAnswer:
    """Read the checkpoint of an experiment with the best validation at its step."""

    def read(connection: Connection) -> BestCheckpointAnswer:
        experiment = find_row(connection, ExperimentRow, experiment_id)
        best_trial = experiment.best_trial_id
        trial = None if best_trial is None else find_row(connection, TrialRow, best_trial)
        return _best(connection, experiment, trial, checkpoints.c.experiment_id == experiment_id)

    return await services.read(read)


@router.get("/trials/{trial_id}/best-checkpoint")
async def get_trial_best_checkpoint(
    services: ServicesDep, trial_id: IdPath
) -> BestCheckpointAnswer:
    """Read the checkpoint of a trial with the best validation at its step."""

    def read(connection: Connection) -> BestCheckpointAnswer:
        trial = find_row(connection, TrialRow, trial_id)
        experiment = find_row(connection, ExperimentRow, trial.experiment_id)
        return _best(connection, experiment, trial, checkpoints.c.trial_id == trial_id)

    return await services.read(read)


def _best(
    connection: Connection,
    experiment: ExperimentRow,
    trial: TrialRow | None,
    condition: ColumnElement[bool],
) -> BestCheckpointAnswer:
    """Return the response with the best checkpoint.

    Args:
        connection: Database connection.
        experiment: Experiment whose metric is used.
        trial: Trial with the best validation, if any.
        condition: Condition that selects the checkpoints to compare.
    """
    best = None
    if experiment.metric:
        query = best_checkpoints(experiment).where(condition).limit(1)
        best = connection.execute(query).one_or_none()
    response = BestCheckpoint(
        checkpoint=queries.checkpoint_list(connection, [best])[0] if best else None,
        validation=wire_number(best.value) if best else None,  # type: ignore[arg-type]
        note=_note(connection, experiment, trial, best),
    )
    return BestCheckpointAnswer(response)


def _note(
    connection: Connection,
    experiment: ExperimentRow,
    trial: TrialRow | None,
    best: Any,
) -> str | None:
    """Return a note if the best validation has no checkpoint and will not get one."""
    if trial is None or trial.best_validation is None or trial.state not in TRIAL_ENDED:
        return None
    if best is not None and best.value == trial.best_validation:
        return None
    at = checkpoints.c
    query = select(at.id).where(at.trial_id == trial.id, at.steps_completed == trial.best_steps)
    deleted = connection.scalar(query.limit(1)) is not None
    config: dict[str, Any] = msgspec.json.decode(experiment.config)
    if "entrypoint" not in config:  # an imported run has no entrypoint
        return None
    return missing_checkpoint(config, trial, deleted=deleted)


@router.get("/checkpoints/{uuid}")
async def get_checkpoint(services: ServicesDep, uuid: str) -> CheckpointAnswer:
    """Read one checkpoint."""

    def read(connection: Connection) -> CheckpointAnswer:
        row = find_row(connection, CheckpointRow, full_uuid(connection, uuid))
        item = queries.checkpoint_list(connection, [row])[0]
        return CheckpointAnswer(item)

    return await services.read(read)


@router.get("/checkpoints/{uuid}/file", response_class=StreamingResponse, responses=FILE_ANSWER)
async def get_checkpoint_file(
    services: ServicesDep,
    uuid: str,
    name: Annotated[str, Query(max_length=4096, description="Path inside the checkpoint.")],
    first: Annotated[int, Query(ge=0, le=2**53, description="Byte to begin with.")] = 0,
) -> StreamingResponse:
    """Download one file of a checkpoint from its storage."""

    def rows(connection: Connection) -> tuple[CheckpointRow, ExperimentRow]:
        return stored_rows(connection, uuid)

    row, experiment = await services.read(rows)
    pieces = await run_in_threadpool(_read_file, services, row, experiment, name, first)
    return StreamingResponse(pieces, media_type="application/octet-stream")


def stored_rows(connection: Connection, uuid: str) -> tuple[CheckpointRow, ExperimentRow]:
    """Return the rows of a checkpoint and its experiment.

    Args:
        connection: Database connection.
        uuid: Uuid of the checkpoint, or its beginning.

    Raises:
        NotFoundError: If there is no such checkpoint.
    """
    row = find_row(connection, CheckpointRow, full_uuid(connection, uuid))
    return row, find_row(connection, ExperimentRow, row.experiment_id)


def open_store(
    services: Services, row: CheckpointRow, experiment: ExperimentRow
) -> "CheckpointStore":
    """Open the storage of a checkpoint.

    Raises:
        ConflictError: If the checkpoint's files are deleted.
    """
    from zerolab.storage.store import CheckpointStore

    if row.state not in _STORED_STATES:
        raise ConflictError(f"checkpoint {row.uuid} is {row.state}: its files are deleted")
    return CheckpointStore(stored_address(services.orchestrator.home, experiment), owner="server")


def _read_file(
    services: Services, row: CheckpointRow, experiment: ExperimentRow, name: str, first: int
) -> Iterator[bytes]:
    store = open_store(services, row, experiment)
    sizes: dict[str, int] = msgspec.json.decode(row.resources)
    if name == "checkpoint.json":
        return iter([store.describe(row.uuid).to_json()[first:]])
    if name not in sizes or file_name_problem(name):
        raise NotFoundError(f"checkpoint {row.uuid} has no file {name[:200]!r}")
    pieces = store.pieces(row.uuid, name, first, sizes[name])
    # Read the first piece now: a failure can still become an error response.
    return chain([next(pieces, b"")], pieces)


def check_storage(
    storage: "CheckpointStorageConfig", installation: str, limit_s: float
) -> list[str]:
    """Check an experiment's object store by writing to it.

    A store that does not respond causes only a warning, since it may recover before a trial starts.

    Args:
        storage: Storage section of the experiment.
        installation: Name of this installation in a shared storage.
        limit_s: Timeout in seconds; those of the storage libraries are minutes.

    Returns:
        Warnings for the user who submits the experiment.

    Raises:
        ConfigError: If the server lacks the package for the storage, or the store denies access.
    """
    from zerolab.config.experiment.storage import address_of
    from zerolab.storage.objects import StorageRefusedError
    from zerolab.storage.registry import storage_problem
    from zerolab.storage.store import CheckpointStore

    address = address_of(storage)
    if address is None or not address.is_remote:
        return []
    missing = storage_problem(address)
    if missing is not None:
        problem = (
            f"checkpoint_storage.type: {missing} (on the server's machine, and on every agent's)"
        )
        raise ConfigError("experiment", [problem])
    result: Future[None] = Future()

    def probe() -> None:
        try:
            CheckpointStore(address, owner=installation).probe_bucket()
        except Exception as error:  # noqa: BLE001 - raised by the future
            result.set_exception(error)
        else:
            result.set_result(None)

    # A daemon thread, not a pool: shutdown must not wait for retries of a library.
    Thread(target=probe, name="storage check", daemon=True).start()
    try:
        result.result(limit_s)
    except StorageRefusedError as error:
        raise ConfigError("experiment", [f"checkpoint_storage: {error}"]) from error
    except StorageError as error:
        problem = str(error)
    except TimeoutError:
        problem = (
            f"checkpoint storage {address.root}: no response within {limit_s:g} s; check that "
            "the server's machine reaches it and has credentials, or correct checkpoint_storage"
        )
    else:
        return []
    logger.warning(
        "an experiment was submitted, but its checkpoint storage does not respond: %s", problem
    )
    return [f"{problem}; the experiment is submitted, and its trials wait for the storage"]
