"""Routes of MLflow's tracking API: experiments, runs, metrics and logged models."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from sqlalchemy import Connection, delete, select, update

from zerolab.contract.limits import LABEL_CHARACTERS
from zerolab.contract.messages import wire_number
from zerolab.contract.names import printable, project_name
from zerolab.errors import ConfigError
from zeroserver.extensions.external_runs.router import NewRun, open_run
from zeroserver.extensions.mlflow_api.activity import LastRequests
from zeroserver.extensions.mlflow_api.artifacts import add_artifact_routes, artifact_files
from zeroserver.extensions.mlflow_api.links import add_link_routes
from zeroserver.extensions.mlflow_api.mapping import (
    Metric,
    MlflowRun,
    MlflowService,
    find_run,
    is_hidden,
    last_points,
    metric_group,
    new_uuid,
    read_runs,
    run_name,
    tag_label,
)
from zeroserver.extensions.mlflow_api.requests import (
    Call,
    Handler,
    MlflowRoute,
    add_route,
    error_answer,
    missing,
)
from zeroserver.extensions.mlflow_api.search_grammar import (
    parse_filter,
    parse_order,
    sorted_items,
)
from zeroserver.extensions.mlflow_api.tables import mlflow_experiments, mlflow_models, mlflow_runs
from zeroserver.services import Services
from zeroserver.store.database import raw_rows
from zeroserver.store.schema import experiments

__all__ = ["router"]

router = APIRouter(route_class=MlflowRoute)

_BATCH_METRICS = 1000
_BATCH = 100
"""Maximum numbers of metrics, and of parameters or tags, of a batch; as in MLflow."""
_PAGE = 1000
_MAX_PAGE = 50_000
_HISTORY_PAGE = 25_000
_MAX_EXPERIMENTS = 1000
_RUN_ATTRIBUTES = (
    "run_id", "run_name", "status", "start_time", "end_time", "artifact_uri", "user_id",
)  # fmt: skip
_EXPERIMENT_ATTRIBUTES = ("experiment_id", "name", "creation_time", "last_update_time")
_MODEL_ATTRIBUTES = ("model_id", "name", "status", "model_type", "source_run_id")
_STATUSES = ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
_MODEL_STATUSES = {
    "LOGGED_MODEL_PENDING", "LOGGED_MODEL_READY", "LOGGED_MODEL_UPLOAD_FAILED",
}  # fmt: skip
_STAGES = {
    "ACTIVE_ONLY": ("active",),
    "DELETED_ONLY": ("deleted",),
    "ALL": ("active", "deleted"),
}

Answer = dict[str, Any]


# -- experiments -----------------------------------------------------------------------------------


def _experiment_answer(row: Any) -> Answer:
    return {
        "experiment_id": str(row.id),
        "name": row.name,
        "artifact_location": "mlflow-artifacts:/",
        "lifecycle_stage": row.stage,
        "creation_time": int(row.created_at * 1000),
        "last_update_time": int(row.updated_at * 1000),
        "tags": _pairs(msgspec.json.decode(row.tags)),
    }


def _pairs(items: dict[str, str]) -> list[Answer]:
    return [{"key": key, "value": value} for key, value in items.items()]


async def _find_experiment(call: Call) -> Any:
    key = call.required("experiment_id")

    def read(connection: Connection) -> Any:
        number = int(key) if key.isascii() and key.isdecimal() and len(key) < 19 else -1
        query = select(mlflow_experiments).where(mlflow_experiments.c.id == number)
        return connection.execute(query).one_or_none()

    row = await call.services.read(read)
    if row is None or is_hidden(call.services.orchestrator, row.id, row.name):
        raise missing("Experiment", key)
    return row


async def create_experiment(call: Call) -> Answer | Response:
    """Create an experiment; its artifacts are always in the checkpoint storage."""
    name, owner_id = call.required("name"), call.principal.user_id
    tags = _tags(call, _BATCH)
    number = await call.services.write(
        lambda work: MlflowService(work).create_experiment(name, tags, owner_id)
    )
    if number is None:
        text = f"Experiment '{name[:200]}' already exists."
        return error_answer(400, "RESOURCE_ALREADY_EXISTS", text)
    return {"experiment_id": str(number)}


async def get_experiment(call: Call) -> Answer:
    """Return an experiment."""
    return {"experiment": _experiment_answer(await _find_experiment(call))}


async def get_experiment_by_name(call: Call) -> Answer:
    """Return the experiment with a name."""
    name = call.required("experiment_name")
    query = select(mlflow_experiments).where(mlflow_experiments.c.name == name)
    row = await call.services.read(lambda connection: connection.execute(query).one_or_none())
    if row is None or is_hidden(call.services.orchestrator, row.id, row.name):
        raise missing("Experiment", name)
    return {"experiment": _experiment_answer(row)}


async def search_experiments(call: Call) -> Answer:
    """Return the experiments that match a filter, newest first."""
    stages = _stages(call.text("view_type"))
    comparisons = parse_filter(call.text("filter"), _EXPERIMENT_ATTRIBUTES)
    orders = parse_order(
        [str(text) for text in call.listed("order_by", _BATCH)], _EXPERIMENT_ATTRIBUTES
    )

    def read(connection: Connection) -> list[Answer]:
        columns = mlflow_experiments.c
        query = select(mlflow_experiments).where(columns.stage.in_(stages))
        rows = connection.execute(query.order_by(columns.updated_at.desc(), columns.id.desc()))
        items = []
        for row in rows:
            if is_hidden(call.services.orchestrator, row.id, row.name):
                continue
            answer = _experiment_answer(row)
            values = {("attribute", name): answer[name] for name in _EXPERIMENT_ATTRIBUTES}
            values |= {("tag", item["key"]): item["value"] for item in answer["tags"]}
            if all(comparison.matches(values) for comparison in comparisons):
                items.append((values, answer))
        return sorted_items(items, orders)

    return _page(call, "experiments", await call.services.read(read), _PAGE)


def _stages(view_type: str) -> tuple[str, ...]:
    stages = _STAGES.get(view_type or "ACTIVE_ONLY")
    if stages is None:
        problem = f"view_type: must be {', '.join(_STAGES)}, got {view_type[:50]!r}"
        raise ConfigError("request", [problem])
    return stages


def _page(call: Call, name: str, items: list[Any], default: int) -> Answer:
    """Return the page of a list that the token names."""
    limit = call.whole("max_results", default) or default
    token = call.text("page_token")
    if not 0 < limit <= _MAX_PAGE:
        problem = f"max_results: must be 1 to {_MAX_PAGE}, got {limit}"
        raise ConfigError("request", [problem])
    if token and not (token.isascii() and token.isdecimal() and len(token) < 16):
        raise ConfigError("request", [f"page_token: must be of this server, got {token[:50]!r}"])
    first = int(token or 0)
    answer: Answer = {name: items[first : first + limit]}
    if first + limit < len(items):
        answer["next_page_token"] = str(first + limit)
    return answer


async def _change_experiment(call: Call, **changes: Any) -> Answer:
    row = await _find_experiment(call)
    await call.check_owner(row.owner_id, f"experiment {row.name!r}")
    await call.services.write(lambda work: MlflowService(work).update_experiment(row.id, **changes))
    return {}


async def update_experiment(call: Call) -> Answer:
    """Rename an experiment."""
    return await _change_experiment(call, name=call.required("new_name"))


async def delete_experiment(call: Call) -> Answer:
    """Mark an experiment as deleted; its runs stay."""
    return await _change_experiment(call, stage="deleted")


async def restore_experiment(call: Call) -> Answer:
    """Restore a deleted experiment."""
    return await _change_experiment(call, stage="active")


async def _tag_experiment(call: Call, value: str | None) -> Answer:
    row, key = await _find_experiment(call), call.required("key")
    await call.check_owner(row.owner_id, f"experiment {row.name!r}")
    await call.services.write(
        lambda work: MlflowService(work).tag_experiment(row.id, row.tags, key, value)
    )
    return {}


async def set_experiment_tag(call: Call) -> Answer:
    """Set a tag of an experiment."""
    return await _tag_experiment(call, call.text("value"))


async def delete_experiment_tag(call: Call) -> Answer:
    """Delete a tag of an experiment."""
    return await _tag_experiment(call, None)


# -- runs ------------------------------------------------------------------------------------------


def _info(services: Services, run: MlflowRun) -> Answer:
    info = {
        "run_id": run.uuid,
        "run_uuid": run.uuid,
        "run_name": run.name,
        "experiment_id": str(run.mlflow_experiment_id),
        "user_id": services.orchestrator.users.name_of(run.owner_id),
        "status": run.status,
        "start_time": run.start_ms,
        "artifact_uri": f"mlflow-artifacts:/{run.uuid}",
        "lifecycle_stage": run.stage,
    }
    if run.end_ms is not None and run.status != "RUNNING":
        info["end_time"] = run.end_ms
    elif run.ended_at is not None:
        info["end_time"] = int(run.ended_at * 1000)
    return info


def _metric_answer(metric: Metric) -> Answer:
    return {
        "key": metric.key,
        "value": wire_number(metric.value),
        "timestamp": round(metric.time * 1000),
        "step": metric.step,
    }


def _run_answer(services: Services, connection: Connection, run: MlflowRun) -> Answer:
    model_ids = connection.scalars(
        select(mlflow_models.c.id).where(mlflow_models.c.run_uuid == run.uuid)
    )
    return {
        "info": _info(services, run),
        "data": {
            "metrics": [_metric_answer(point) for point in last_points(connection, run.trial_id)],
            "params": _pairs(run.params),
            "tags": _pairs(run.tags),
        },
        "inputs": {},
        "outputs": {"model_outputs": [{"model_id": model, "step": 0} for model in model_ids]},
    }


async def _read_run(call: Call) -> MlflowRun:
    key = call.required("run_id", "run_uuid")
    return await call.services.read(lambda connection: find_run(connection, key))


async def _own_run(call: Call, key: str = "") -> MlflowRun:
    """Return the run of a request that changes it."""
    key = key or call.required("run_id", "run_uuid")
    run = await call.services.read(lambda connection: find_run(connection, key))
    await call.check_owner(run.owner_id, f"run {run.uuid}")
    requests = call.services.part(LastRequests)
    if run.is_lost:
        run = await _reopen(call, run)
    if run.status == "RUNNING":
        requests.times[run.run_id] = call.services.orchestrator.steady()
    return run


async def _reopen(call: Call, run: MlflowRun) -> MlflowRun:
    """Continue a run that has ended."""
    body = NewRun(id=run.uuid, session=run.uuid, name=run.name)

    def also(work: Any, opened: Any) -> None:
        MlflowService(work).set_row(run, opened.run_id)

    await open_run(call.services, body, run.owner_id, also)
    return await call.services.read(lambda connection: find_run(connection, run.uuid))


def _tags(call: Call, limit: int) -> dict[str, str]:
    return {item.required("key"): item.text("value") for item in call.parts("tags", limit)}


async def create_run(call: Call) -> Answer:
    """Create a run: an experiment with one trial, which is active at once."""
    experiment = await _find_experiment(call)
    if experiment.stage != "active":
        text = f"experiment {experiment.name!r}: must not be deleted; restore it first"
        raise ConfigError("request", [text])
    services, tags = call.services, _tags(call, _BATCH)
    run_uuid = new_uuid()
    name = run_name(call.text("run_name") or tags.get("mlflow.runName", ""), run_uuid)
    tags["mlflow.runName"] = name
    start_ms = call.whole("start_time") or int(services.orchestrator.clock() * 1000)
    labels = [printable(experiment.name)[:LABEL_CHARACTERS]]
    labels += [label for key, value in tags.items() if (label := tag_label(key, value))]
    body = NewRun(
        id=run_uuid,
        session=run_uuid,
        name=name,
        labels=list(dict.fromkeys(labels)),
        project="" if experiment.id == 0 else project_name(experiment.name),
        create_project=True,
    )

    def also(work: Any, opened: Any) -> None:
        row = {
            "uuid": run_uuid,
            "mlflow_experiment_id": experiment.id,
            "experiment_id": opened.experiment_id,
            "trial_id": opened.trial_id,
            "run_id": opened.run_id,
            "name": name,
            "start_ms": start_ms,
        }
        MlflowService(work).add_run(row, tags)

    opened = await open_run(services, body, call.principal.user_id, also)
    services.part(LastRequests).times[opened.run_id] = services.orchestrator.steady()
    return {"run": await services.read(
        lambda connection: _run_answer(services, connection, find_run(connection, run_uuid))
    )}  # fmt: skip


async def get_run(call: Call) -> Answer:
    """Return a run with its last metrics, parameters and tags."""
    run, services = await _read_run(call), call.services
    return {"run": await services.read(
        lambda connection: _run_answer(services, connection, run)
    )}  # fmt: skip


async def update_run(call: Call) -> Answer:
    """Rename, end or continue a run."""
    run, status = await _own_run(call), call.text("status")
    if status.isdecimal() and 0 < int(status) <= len(_STATUSES):
        status = _STATUSES[int(status) - 1]
    if status and status not in _STATUSES:
        problem = f"status: must be {', '.join(_STATUSES)}, got {status[:50]!r}"
        raise ConfigError("request", [problem])
    name, end_ms = printable(call.text("run_name")), call.whole("end_time")
    if status in {"RUNNING", "SCHEDULED"} and run.status != "RUNNING":
        run = await _reopen(call, run)
    await call.services.write(
        lambda work: MlflowService(work).update_run(run, name or None, status or None, end_ms)
    )
    run = await _read_run(call)
    if run.status != "RUNNING":
        call.services.part(LastRequests).times.pop(run.run_id, None)
    return {"run_info": _info(call.services, run)}


async def _move_run(call: Call, stage: str) -> Answer:
    run = await _own_run(call)
    await call.services.write(lambda work: MlflowService(work).move_run(run, stage))
    return {}


async def delete_run(call: Call) -> Answer:
    """Mark a run as deleted, and archive its experiment."""
    return await _move_run(call, "deleted")


async def restore_run(call: Call) -> Answer:
    """Restore a deleted run."""
    return await _move_run(call, "active")


async def _log(
    call: Call,
    metrics: Sequence[Metric] = (),
    params: Sequence[tuple[str, str]] = (),
    tags: Sequence[tuple[str, str | None]] = (),
) -> Answer | Response:
    run = await _own_run(call)
    # Every value of the validation group can take a while: a transaction stores a part of them.
    parts = [metrics[first : first + _BATCH] for first in range(0, len(metrics), _BATCH)] or [()]
    for number, part in enumerate(parts):
        others = (params, tags) if number == 0 else ((), ())

        def job(work: Any, part: Any = part, others: Any = others) -> bool:
            return MlflowService(work).log(run, part, *others)

        if not await call.services.write(job):
            text = f"run {run.uuid} was canceled by a user in experiment {run.experiment_id}"
            return error_answer(409, "INVALID_STATE", text)
    return {}


def _metric(call: Call, now: float) -> Metric:
    time_ms = call.whole("timestamp")
    return Metric(
        call.required("key"),
        call.number("value"),
        now if time_ms is None else time_ms / 1000,
        call.whole("step", 0) or 0,
    )


async def log_metric(call: Call) -> Answer | Response:
    """Store a value of a metric."""
    return await _log(call, metrics=[_metric(call, call.services.orchestrator.clock())])


async def log_parameter(call: Call) -> Answer | Response:
    """Store a parameter."""
    return await _log(call, params=[(call.required("key"), call.text("value"))])


async def log_batch(call: Call) -> Answer | Response:
    """Store metrics, parameters and tags."""
    now = call.services.orchestrator.clock()
    metrics = [_metric(item, now) for item in call.parts("metrics", _BATCH_METRICS)]
    params = [(item.required("key"), item.text("value")) for item in call.parts("params", _BATCH)]
    if len(dict(params)) < len(set(params)):
        raise ConfigError("request", ["params: must have one value of each key"])
    return await _log(call, metrics, params, list(_tags(call, _BATCH).items()))


async def set_tag(call: Call) -> Answer | Response:
    """Set a tag of a run."""
    return await _log(call, tags=[(call.required("key"), call.text("value"))])


async def delete_tag(call: Call) -> Answer | Response:
    """Delete a tag of a run."""
    return await _log(call, tags=[(call.required("key"), None)])


async def ignore(call: Call) -> Answer:
    """Accept what has no counterpart: descriptions of data sets, and outputs of a run."""
    await _own_run(call)
    return {}


async def search_runs(call: Call) -> Answer:
    """Return the runs of experiments that match a filter, newest first."""
    services = call.services
    stages = _stages(call.text("run_view_type"))
    texts = [str(text) for text in call.listed("experiment_ids", _MAX_EXPERIMENTS)]
    numbers = [int(text) for text in texts if text.isascii() and text.isdecimal()]
    comparisons = parse_filter(call.text("filter"), _RUN_ATTRIBUTES)
    order_texts = [str(text) for text in call.listed("order_by", _BATCH)]
    orders = parse_order(order_texts, _RUN_ATTRIBUTES)
    needs_metrics = "metric" in {item.kind for item in comparisons + list[Any](orders)}

    def read(connection: Connection) -> list[MlflowRun]:
        columns = mlflow_runs.c
        runs = read_runs(
            connection,
            columns.mlflow_experiment_id.in_(numbers) & columns.stage.in_(stages),
        )
        items = []
        for run in runs:
            info = _info(services, run)
            values: dict[tuple[str, str], Any] = {
                ("attribute", name): info.get(name) for name in _RUN_ATTRIBUTES
            }
            values |= {("param", key): value for key, value in run.params.items()}
            values |= {("tag", key): value for key, value in run.tags.items()}
            if needs_metrics:
                points = last_points(connection, run.trial_id)
                values |= {("metric", point.key): point.value for point in points}
            if all(comparison.matches(values) for comparison in comparisons):
                items.append((values, run))
        return sorted_items(items, orders)

    answer = _page(call, "runs", await services.read(read), _PAGE)
    answer["runs"] = await services.read(
        lambda connection: [_run_answer(services, connection, run) for run in answer["runs"]]
    )
    return answer


async def get_history(call: Call) -> Answer:
    """Return the values of a metric, in the order of their steps."""
    run, key = await _read_run(call), call.required("metric_key")
    limit = min(call.whole("max_results", _HISTORY_PAGE) or _HISTORY_PAGE, _HISTORY_PAGE)
    after = call.whole("page_token", -1)

    def read(connection: Connection) -> Answer:
        query = (
            "SELECT p.step, p.value, p.time FROM points p JOIN metric_keys k ON k.id = p.key_id "
            "WHERE p.trial_id = ? AND k.group_name = ? AND k.name = ? AND p.step > ? "
            "ORDER BY p.step LIMIT ?"
        )
        group = metric_group(key)
        rows = raw_rows(connection, query, (run.trial_id, group, key, after, max(limit, 1)))
        metrics = [
            _metric_answer(Metric(key, math.nan if value is None else value, time, step))
            for step, value, time in rows
        ]
        answer: Answer = {"metrics": metrics}
        if len(rows) == limit:
            answer["next_page_token"] = str(rows[-1][0])
        return answer

    return await call.services.read(read)


async def list_artifacts(call: Call) -> Answer:
    """Return files and folders of a run."""
    run = await _read_run(call)
    path = call.text("path").strip("/")
    files = await artifact_files(call.services, run, path, relative=False)
    return {"root_uri": f"mlflow-artifacts:/{run.uuid}", "files": files}


# -- logged models ---------------------------------------------------------------------------------


async def _find_model(call: Call, *, to_change: bool = False) -> tuple[MlflowRun, Answer]:
    key = call.required("model_id")
    query = select(mlflow_models).where(mlflow_models.c.id == key)
    row = await call.services.read(lambda connection: connection.execute(query).one_or_none())
    if row is None:
        raise missing("Logged model", key)
    run = await call.services.read(lambda connection: find_run(connection, row.run_uuid))
    if to_change:
        await call.check_owner(run.owner_id, f"model {key}")
    return run, msgspec.json.decode(row.content)


async def create_model(call: Call) -> Answer:
    """Create a logged model, whose files are artifacts of its run."""
    run = await _own_run(call, call.text("source_run_id"))
    now = int(call.services.orchestrator.clock() * 1000)
    model_id = f"m-{new_uuid()}"
    model = {
        "info": {
            "model_id": model_id,
            "experiment_id": str(run.mlflow_experiment_id),
            "name": call.text("name") or model_id,
            "creation_timestamp_ms": now,
            "last_updated_timestamp_ms": now,
            "artifact_uri": f"mlflow-artifacts:/{run.uuid}/models/{model_id}",
            "status": "LOGGED_MODEL_PENDING",
            "model_type": call.text("model_type"),
            "source_run_id": run.uuid,
            "tags": _pairs(_tags(call, _BATCH)),
        },
        "data": {"params": _params(call), "metrics": []},
    }
    row = {"id": model_id, "run_uuid": run.uuid, "content": msgspec.json.encode(model).decode()}
    await call.services.write(
        lambda work: work.connection.execute(mlflow_models.insert().values(row))
    )
    return {"model": model}


def _params(call: Call) -> list[Answer]:
    return [
        {"key": item.required("key"), "value": item.text("value")}
        for item in call.parts("params", _BATCH)
    ]


async def get_model(call: Call) -> Answer:
    """Return a logged model."""
    _, model = await _find_model(call)
    return {"model": model}


async def _save_model(call: Call, model: Answer) -> Answer:
    model["info"]["last_updated_timestamp_ms"] = int(call.services.orchestrator.clock() * 1000)
    text = msgspec.json.encode(model).decode()
    statement = update(mlflow_models).where(mlflow_models.c.id == model["info"]["model_id"])
    await call.services.write(lambda work: work.connection.execute(statement.values(content=text)))
    return {"model": model}


async def finalize_model(call: Call) -> Answer:
    """Set the status of a logged model after its upload."""
    _, model = await _find_model(call, to_change=True)
    status = call.required("status")
    if status not in _MODEL_STATUSES:
        problem = f"status: must be {', '.join(sorted(_MODEL_STATUSES))}, got {status[:50]!r}"
        raise ConfigError("request", [problem])
    model["info"]["status"] = status
    return await _save_model(call, model)


async def log_model_params(call: Call) -> Answer:
    """Add parameters of a logged model."""
    _, model = await _find_model(call, to_change=True)
    params = {item["key"]: item["value"] for item in (*model["data"]["params"], *_params(call))}
    model["data"]["params"] = _pairs(params)
    return await _save_model(call, model)


async def tag_model(call: Call) -> Answer:
    """Set tags of a logged model."""
    _, model = await _find_model(call, to_change=True)
    tags = {item["key"]: item["value"] for item in model["info"]["tags"]}
    model["info"]["tags"] = _pairs(tags | _tags(call, _BATCH))
    return await _save_model(call, model)


async def delete_model(call: Call) -> Answer:
    """Delete a logged model; its files stay until the experiment is deleted."""
    await _find_model(call, to_change=True)
    key = call.required("model_id")
    await call.services.write(
        lambda work: work.connection.execute(delete(mlflow_models).where(mlflow_models.c.id == key))
    )
    return {}


async def search_models(call: Call) -> Answer:
    """Return the logged models of experiments that match a filter, newest first."""
    texts = [str(text) for text in call.listed("experiment_ids", _MAX_EXPERIMENTS)]
    numbers = [int(text) for text in texts if text.isascii() and text.isdecimal()]
    comparisons = parse_filter(call.text("filter"), _MODEL_ATTRIBUTES)
    query = (
        select(mlflow_models.c.content)
        .join(mlflow_runs, mlflow_runs.c.uuid == mlflow_models.c.run_uuid)
        .join(experiments, experiments.c.id == mlflow_runs.c.experiment_id)
        .where(mlflow_runs.c.mlflow_experiment_id.in_(numbers))
        .order_by(mlflow_runs.c.start_ms.desc())
    )

    def read(connection: Connection) -> list[Answer]:
        models = []
        for content in connection.scalars(query):
            model = msgspec.json.decode(content)
            info = model["info"]
            values = {("attribute", name): info[name] for name in _MODEL_ATTRIBUTES}
            values |= {("tag", item["key"]): item["value"] for item in info["tags"]}
            values |= {("param", item["key"]): item["value"] for item in model["data"]["params"]}
            if all(comparison.matches(values) for comparison in comparisons):
                models.append(model)
        return models

    return _page(call, "models", await call.services.read(read), _BATCH)


async def list_model_artifacts(call: Call) -> Answer:
    """Return the files of a logged model."""
    run, model = await _find_model(call)
    root = f"models/{model['info']['model_id']}"
    path = call.text("artifact_directory_path").strip("/")
    files = await artifact_files(
        call.services, run, f"{root}/{path}" if path else root, relative=False
    )
    for item in files:
        item["path"] = item["path"].removeprefix(f"{root}/")
    return {"root_uri": model["info"]["artifact_uri"], "files": files}


# -- table of routes -------------------------------------------------------------------------------

_READS: dict[str, Handler] = {
    "GET experiments/get": get_experiment,
    "GET experiments/get-by-name": get_experiment_by_name,
    "POST experiments/search": search_experiments,
    "GET experiments/search": search_experiments,
    "GET runs/get": get_run,
    "POST runs/search": search_runs,
    "GET metrics/get-history": get_history,
    "GET artifacts/list": list_artifacts,
    "POST logged-models/search": search_models,
    "GET logged-models/{model_id}": get_model,
    "GET logged-models/{model_id}/artifacts/directories": list_model_artifacts,
}

_REPORTS: dict[str, Handler] = {
    "POST runs/log-metric": log_metric,
    "POST runs/log-parameter": log_parameter,
    "POST runs/log-batch": log_batch,
    "POST runs/log-model": ignore,
    "POST runs/log-inputs": ignore,
    "POST runs/outputs": ignore,
    "POST runs/set-tag": set_tag,
    "POST runs/delete-tag": delete_tag,
    "PATCH logged-models/{model_id}": finalize_model,
    "PATCH logged-models/{model_id}/tags": tag_model,
    "POST logged-models/{model_id}/params": log_model_params,
}
"""Reports of programs, which are not in the audit log."""

_CHANGES: dict[str, Handler] = {
    "POST experiments/create": create_experiment,
    "POST experiments/update": update_experiment,
    "POST experiments/delete": delete_experiment,
    "POST experiments/restore": restore_experiment,
    "POST experiments/set-experiment-tag": set_experiment_tag,
    "POST experiments/delete-experiment-tag": delete_experiment_tag,
    "POST runs/create": create_run,
    "POST runs/update": update_run,
    "POST runs/delete": delete_run,
    "POST runs/restore": restore_run,
    "POST logged-models": create_model,
    "DELETE logged-models/{model_id}": delete_model,
}

for _route, _handler in _READS.items():
    add_route(router, _route, _handler, "viewer")
for _route, _handler in _REPORTS.items():
    add_route(router, _route, _handler, "member")
for _route, _handler in _CHANGES.items():
    add_route(router, _route, _handler, "member", audited=True)
add_artifact_routes(router)
add_link_routes(router)
