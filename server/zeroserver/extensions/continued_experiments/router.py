"""Route that continues an experiment."""

import msgspec
from starlette.concurrency import run_in_threadpool

from zerolab.contract.secrets import restore_secrets
from zeroserver.access.routes import ACCESS, own
from zeroserver.api.common import IdPath
from zeroserver.api.experiments import Changes, experiment_answer, overlay
from zeroserver.api.resources import ExperimentAnswer
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.continued_experiments.service import (
    Continuation,
    ExperimentContinuation,
    prepare_continuation,
)
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.services import ServicesDep
from zeroserver.store.archives import archive_path, reader
from zeroserver.store.rows import ExperimentRow, find_row

__all__ = ["router"]

router = resource_router("/api/v1/experiments", "experiments")

ACCESS["POST /api/v1/experiments/{experiment_id}/continue"] = own("experiment")


@router.post("/{experiment_id}/continue")
async def continue_experiment(
    services: ServicesDep, experiment_id: IdPath, changes: Changes | None = None
) -> ExperimentAnswer:
    """Continue an ended experiment from its checkpoints, with changes."""
    request = changes or Changes()
    original = await services.read(
        lambda connection: find_row(connection, ExperimentRow, experiment_id)
    )
    submitted = msgspec.json.decode(original.raw_config)
    raw = restore_secrets(overlay(submitted, request.config), submitted)
    path = archive_path(services.orchestrator.home.archives, original.archive)

    def check() -> Continuation:
        from zerolab.config.validation import check_experiment

        checked = check_experiment(raw, reader(path.read_bytes()))
        config = services.orchestrator.defaults.limit(checked)
        return Continuation(config, raw, original.raw_config, request.activate)

    going_on = await run_in_threadpool(check)
    parts = await services.read(
        lambda connection: prepare_continuation(
            services.orchestrator, connection, experiment_id, going_on
        )
    )
    for part in parts:

        def reopen_early(work: UnitOfWork, part: range = part) -> None:
            ExperimentContinuation(work).reopen_early(experiment_id, going_on, part)

        await services.write(reopen_early)
    await services.write(
        lambda work: ExperimentContinuation(work).continue_experiment(experiment_id, going_on)
    )
    await services.execute_operations()
    await services.apply_states()
    return await services.read(
        lambda connection: experiment_answer(services, connection, experiment_id)
    )
