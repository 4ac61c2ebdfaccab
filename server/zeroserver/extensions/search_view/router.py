"""Route of the state of a search: rungs and trials."""

from sqlalchemy import Connection, select

from zerolab.contract.messages import wire_number
from zerolab.searcher.view import BracketView, RungView
from zeroserver.access.routes import ACCESS, shown
from zeroserver.api.common import IdPath
from zeroserver.api.strict_route import resource_router
from zeroserver.extensions.search_view.resources import (
    Bracket,
    Rung,
    RungEntry,
    SearcherAnswer,
    SearcherState,
)
from zeroserver.orchestrator.search.search_service import CurrentView, look_back
from zeroserver.services import Services, ServicesDep
from zeroserver.states import EXPERIMENT_ENDED
from zeroserver.store.rows import ExperimentRow, find_row
from zeroserver.store.schema import trials

__all__ = ["router"]

router = resource_router("/api/v1/experiments", "search")

ACCESS["GET /api/v1/experiments/{experiment_id}/searcher"] = shown(
    "experiment", frozenset({"search"})
)


@router.get("/{experiment_id}/searcher")
async def get_searcher(services: ServicesDep, experiment_id: IdPath) -> SearcherAnswer:
    """Read the state of a search: its rungs, and the trials at and training towards each."""
    row = await services.read(lambda connection: find_row(connection, ExperimentRow, experiment_id))
    view = await _current_view(services, row)
    ids = await services.read(lambda connection: _ids(connection, experiment_id))
    state = SearcherState(
        name=row.searcher_name,
        unit=view.unit,
        metric=row.metric or None,
        smaller_is_better=bool(row.smaller_is_better),
        done=bool(row.searcher_done),
        progress=row.progress,
        brackets=[_bracket(bracket, ids) for bracket in view.view.brackets],
        problem=view.problem,
    )
    return SearcherAnswer(state)


async def _current_view(services: Services, row: ExperimentRow) -> CurrentView:
    """Return the view of a search; that of an ended experiment is replayed."""
    if row.state in EXPERIMENT_ENDED:
        return await services.read(
            lambda connection: look_back(services.orchestrator, connection, row)
        )
    await services.load_searcher(row.id)
    return await services.write(lambda work: work.searches.view(row.id))


def _ids(connection: Connection, experiment_id: int) -> dict[int, int]:
    query = select(trials.c.request_id, trials.c.id).where(trials.c.experiment_id == experiment_id)
    return {row.request_id: row.id for row in connection.execute(query)}


def _bracket(bracket: BracketView, ids: dict[int, int]) -> Bracket:
    return Bracket(bracket.trials, [_rung(rung, ids) for rung in bracket.rungs])


def _rung(rung: RungView, ids: dict[int, int]) -> Rung:
    training = [ids[number] for number in rung.training if number in ids]
    entries = [
        RungEntry(
            ids[entry.trial_id],
            None if entry.metric is None else wire_number(entry.metric),  # type: ignore[arg-type]
            entry.state,
        )
        for entry in rung.entries
        if entry.trial_id in ids
    ]
    return Rung(rung.length, training, entries)
