"""Routes of experiments: submit, list, read, change, fork, continue and delete."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, File, Form, Query, Response, UploadFile
from fastapi.responses import FileResponse
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, Select, select
from starlette.concurrency import run_in_threadpool

from zerolab.contract.limits import LABEL_CHARACTERS, LABELS, NAME_CHARACTERS
from zerolab.contract.names import DEFAULT_PROJECT
from zerolab.contract.secrets import restore_secrets
from zerolab.errors import ConfigError, ForbiddenError
from zeroserver.access.principal import Principal, PrincipalDep
from zeroserver.api import queries
from zeroserver.api.common import After, IdPath, Limit, Name, PlainText
from zeroserver.api.queries import PageRequest
from zeroserver.api.resources import ExperimentAnswer, ExperimentPage
from zeroserver.api.strict_route import resource_router
from zeroserver.errors import StoreError
from zeroserver.orchestrator.experiment_service import Submission
from zeroserver.orchestrator.search.search_service import NewSearch
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import Services, ServicesDep
from zeroserver.states import ExperimentState
from zeroserver.store.archives import ArchiveGoneError, archive_path, reader, store_archive
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import experiments

__all__ = [
    "Changes",
    "FilterDep",
    "experiment_answer",
    "overlay",
    "project_id",
    "router",
    "submit_again",
]

router = resource_router("/api/v1/experiments", "experiments")

Sort = Literal[
    "id", "-id", "name", "-name", "state", "-state", "progress", "-progress",
    "best_validation", "-best_validation", "num_trials", "-num_trials",
]  # fmt: skip


@router.post("", status_code=201)
async def create_experiment(
    services: ServicesDep,
    config: Annotated[str, Form(description="The experiment file as JSON.")],
    archive: Annotated[UploadFile, File(description="tar.gz of the model directory.")],
    principal: PrincipalDep,
    activate: bool = True,
    test: bool = False,
) -> ExperimentAnswer:
    """Submit an experiment after a complete validation."""
    raw = _mapping(config)
    content = await archive.read()
    user_id = principal.user_id
    submission = await run_in_threadpool(_checked, services, raw, content, user_id, activate, test)
    return await _submit(services, submission, content)


def _mapping(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ConfigError("experiment", [f"config: must be a JSON object ({error})"]) from None


def _checked(
    services: Services,
    raw: Mapping[str, Any],
    content: bytes,
    owner_id: int,
    activate: bool,
    test: bool,
) -> Submission:
    # Imported here, since they load the engine's configuration, which startup does not need.
    from zerolab.config.validation import check_experiment
    from zerolab.schema.hyperparameters import space_warnings
    from zeroserver.api.checkpoints import check_storage

    limit = services.settings.limits.archive_bytes
    if len(content) > limit:
        problem = f"must have at most {limit} bytes, got {len(content)}; list unneeded files "
        raise ConfigError("archive", [problem + "in .zerolabignore"])
    raw = services.orchestrator.defaults.fill(raw)
    checked = services.orchestrator.defaults.limit(check_experiment(raw, reader(content)))
    warnings = check_storage(
        checked.checkpoint_storage,
        services.orchestrator.installation,
        services.settings.timings.storage_check_s,
    )
    warnings += space_warnings(checked.hyperparameters)
    if test and checked.trial_class is None:
        message = (
            "the entrypoint is a command, of which only transformers' Trainer is limited "
            "to one batch"
        )
        warnings.append(f"test mode: {message}; any other training loop runs in full")
    seed = checked.reproducibility.experiment_seed
    seed = secrets.randbelow(2**31) if seed is None else seed
    return Submission(
        config=checked,
        prepared_search=[NewSearch.of(checked, seed)],
        raw_config=raw,
        # Stored before the row that refers to it: after a crash in between, the next start removes
        # the file. The reverse order could leave an experiment without its code.
        archive=store_archive(services.orchestrator.home.archives, content),
        seed=seed,
        owner_id=owner_id,
        activate=activate,
        test_mode=test,
        warnings=warnings,
    )


async def _submit(services: Services, submission: Submission, content: bytes) -> ExperimentAnswer:
    archives = services.orchestrator.home.archives
    while True:
        try:
            experiment_id = await services.write(lambda work: work.experiments.create(submission))
            break
        except ArchiveGoneError:  # removed with an experiment that was deleted concurrently
            await run_in_threadpool(store_archive, archives, content)
        except Exception:
            with suppress(StoreError):  # the next start removes the archive
                await services.write(
                    lambda work: work.experiments.release_archive(submission.archive)
                )
            raise
    await services.execute_operations()
    warnings = submission.warnings
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id, warnings)
    )


def experiment_answer(
    services: Services,
    connection: Connection,
    experiment_id: int,
    warnings: Sequence[str] = (),
) -> ExperimentAnswer:
    """Return the response with an experiment and the warnings of its submission."""
    row = find_row(connection, ExperimentRow, experiment_id)
    return ExperimentAnswer(queries.experiment(row, services.orchestrator), list(warnings))


Filter = Callable[[Select[Any]], Select[Any]]


async def _filter(
    services: ServicesDep,
    state: Annotated[ExperimentState | None, Query()] = None,
    name: Annotated[str | None, Query(max_length=255, description="Part of the name.")] = None,
    label: Annotated[str | None, Query(max_length=255)] = None,
    user: Annotated[str | None, Query(max_length=255, description="Name of the owner.")] = None,
    project: Annotated[str | None, Query(max_length=255, description="Its project.")] = None,
    archived: bool | None = None,
) -> Filter:
    """Return the function that adds the conditions of a request to a query of experiments."""
    owner = None if user is None else services.orchestrator.users.find(user)
    if user is not None and owner is None:
        problem = f"user: must be the name of a user, got {user!r}; `zerolab user list` lists them"
        raise ConfigError("request", [problem])
    member_of = None if project is None else project_id(services, project)

    def add_conditions(query: Select[Any]) -> Select[Any]:
        columns = experiments.c
        if state is not None:
            query = query.where(columns.state == state)
        if name is not None:
            query = query.where(columns.name.icontains(name, autoescape=True))
        if label is not None:
            quoted = msgspec.json.encode(label).decode()
            query = query.where(columns.labels.contains(quoted, autoescape=True))
        if owner is not None:
            query = query.where(columns.owner_id == owner.id)
        if member_of is not None:
            query = query.where(columns.project_id == member_of)
        if archived is not None:
            query = query.where(columns.archived == int(archived))
        return query

    return add_conditions


FilterDep = Annotated[Filter, Depends(_filter)]
"""Dependency: adds the conditions of a request to a query of experiments."""


@router.get("")
async def list_experiments(
    services: ServicesDep,
    filters: FilterDep,
    sort: Sort = "-id",
    after: After = None,
    limit: Limit = 100,
) -> ExperimentPage:
    """List experiments, newest first."""

    def read(connection: Connection) -> ExperimentPage:
        query = filters(select(experiments))
        rows, next_after = queries.page(
            connection, ExperimentRow, query, PageRequest(sort, after, limit)
        )
        items = [queries.experiment(row, services.orchestrator) for row in rows]
        return ExperimentPage(items, next_after)

    return await services.read(read)


def project_id(services: Services, name: str) -> int:
    """Return the id of the project of a filter.

    Raises:
        ConfigError: If there is no such project.
    """
    project = services.orchestrator.projects.find(name)
    if project is None:
        problem = f"project: must be the name of a project, got {name!r}"
        raise ConfigError("request", [f"{problem}; `zerolab project list` lists them"])
    return project.id


@router.get("/{experiment_id}")
async def get_experiment(services: ServicesDep, experiment_id: IdPath) -> ExperimentAnswer:
    """Read one experiment."""
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )


class ExperimentPatch(BaseModel):
    """Changes of an experiment; omitted fields stay unchanged."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[Name, Field(min_length=1, max_length=NAME_CHARACTERS)] | None = None
    description: Annotated[PlainText, Field(max_length=10_000)] | None = None
    labels: (
        Annotated[
            list[Annotated[Name, Field(max_length=LABEL_CHARACTERS)]],
            Field(max_length=LABELS),
        ]
        | None
    ) = None
    notes: Annotated[PlainText, Field(max_length=1_000_000)] | None = None
    archived: bool | None = None
    project: Annotated[Name, Field(max_length=64)] | None = None


@router.patch("/{experiment_id}")
async def patch_experiment(
    services: ServicesDep, experiment_id: IdPath, patch: ExperimentPatch
) -> ExperimentAnswer:
    """Change an experiment's name, description, labels, notes or project, or archive it."""

    def job(work: UnitOfWork) -> None:
        work.find(ExperimentRow, experiment_id)
        values: dict[str, Any] = {
            key: value
            for key, value in patch.model_dump(include={"name", "description", "notes"}).items()
            if value is not None
        }
        if patch.labels is not None:
            values["labels"] = msgspec.json.encode(patch.labels).decode()
        if values:
            work.save(experiments, experiment_id, **values)
            work.forget_job(experiment_id)  # its labels may have quotas
        if patch.project is not None:
            work.experiments.move(experiment_id, patch.project)
        if patch.archived is not None:
            action = "archive" if patch.archived else "unarchive"
            work.experiments.act(experiment_id, action)
        work.touch("experiment", experiment_id, experiment_id)

    await services.write(job)
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )


@router.delete("/{experiment_id}", status_code=204)
async def delete_experiment(services: ServicesDep, experiment_id: IdPath) -> Response:
    """Delete an ended experiment, its checkpoints and its archive."""

    def job(work: UnitOfWork) -> bool:
        return work.experiments.remove(experiment_id)

    while not await services.write(job):  # other jobs may run in between
        services.database.deleted = True
    services.database.deleted = True
    await services.remove_orphans()
    return Response(status_code=204)


class Changes(BaseModel):
    """Changes of an experiment's configuration."""

    model_config = ConfigDict(extra="forbid")

    config: dict[str, Any] = Field(default_factory=dict)
    """Merged into the submitted configuration, block by block."""
    activate: bool = True
    """If false, the new experiment is paused."""


class Fork(Changes):
    """Fork of an experiment, with changes or another file."""

    yaml: Annotated[PlainText, Field(max_length=1_000_000)] | None = None
    """Complete experiment file that replaces the original's; `config` is merged into it."""


@router.post("/{experiment_id}/fork", status_code=201)
async def fork_experiment(
    services: ServicesDep,
    principal: PrincipalDep,
    experiment_id: IdPath,
    fork: Fork | None = None,
) -> ExperimentAnswer:
    """Fork an experiment, with changes or another file; 403 for secrets of another user."""
    fork = fork or Fork()
    original = await services.read(
        lambda connection: find_row(connection, ExperimentRow, experiment_id)
    )
    if fork.yaml is None:
        base = msgspec.json.decode(original.raw_config)
    else:
        base = await run_in_threadpool(_read_yaml, fork.yaml)
    submitted = msgspec.json.decode(original.raw_config)
    raw = restore_secrets(overlay(base, fork.config), submitted)
    return await submit_again(services, principal, original, raw, activate=fork.activate)


def _read_yaml(text: str) -> dict[str, Any]:
    from zerolab.config.files import parse_yaml  # as in _checked

    return parse_yaml(text, "experiment")


async def submit_again(
    services: Services,
    principal: Principal,
    original: ExperimentRow,
    raw: Mapping[str, Any],
    *,
    activate: bool,
) -> ExperimentAnswer:
    """Submit the model directory of an experiment with another configuration.

    Raises:
        ForbiddenError: If the experiment has secrets and belongs to another user: the fork could
            print them, from the environment or from the experiment file in the model directory.
    """
    if services.orchestrator.defaults.has_secrets(msgspec.json.decode(original.raw_config)):
        try:
            await services.ownership.require(principal, "experiment", str(original.id))
        except ForbiddenError as error:
            msg = f"{error}: its configuration contains secrets; submit your own copy"
            raise ForbiddenError(msg) from None
    path = archive_path(services.orchestrator.home.archives, original.archive)
    submitted = msgspec.json.decode(original.raw_config).get("project")
    project = services.orchestrator.projects.name_of(original.project_id)
    if raw.get("project") == submitted and project != (submitted or DEFAULT_PROJECT):
        raw = {**raw, "project": project}  # the original has moved since its submission

    def check() -> tuple[Submission, bytes]:
        content = path.read_bytes()
        test = bool(original.test_mode)
        return _checked(services, raw, content, principal.user_id, activate, test), content

    checked, content = await run_in_threadpool(check)
    return await _submit(services, replace(checked, forked_from=original.id), content)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge one configuration into another, block by block; other values are replaced."""
    result = dict(base)
    for key, value in over.items():
        current = result.get(key)
        is_block = isinstance(value, Mapping) and isinstance(current, Mapping)
        result[key] = overlay(current, value) if is_block else value  # type: ignore[arg-type]
    return result


_ARCHIVE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/gzip": {}}, "description": "The archive."}
}


@router.get("/{experiment_id}/archive", response_class=FileResponse, responses=_ARCHIVE)
async def get_archive(services: ServicesDep, experiment_id: IdPath) -> FileResponse:
    """Download the model directory as tar.gz."""

    def read(connection: Connection) -> FileResponse:
        row = find_row(connection, ExperimentRow, experiment_id)
        path: Path = archive_path(services.orchestrator.home.archives, row.archive)
        return FileResponse(path, media_type="application/gzip", filename="model.tar.gz")

    return await services.read(read)


Action = Literal["pause", "activate", "cancel", "kill", "archive", "unarchive"]


@router.post("/{experiment_id}/{action}")
async def act_on_experiment(
    services: ServicesDep, experiment_id: IdPath, action: Action
) -> ExperimentAnswer:
    """Pause, activate, cancel, kill, archive or unarchive an experiment; idempotent."""
    if action == "activate":
        await services.load_searcher(experiment_id)
    await services.write(lambda work: work.experiments.act(experiment_id, action))
    await services.apply_states()
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )
