"""Continuation of ended experiments, with configuration changes, and of single trials.

Trials go on from their newest checkpoints, under the same numbers; their curves grow. The searcher
is made anew from the new configuration and all it was ever told: what it now wants and has not
got is carried out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, RowMapping, select

from zerolab.contract.secret_text import mask_values
from zerolab.contract.secrets import find_secrets, mask_secrets
from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Continue, Create, Operation, Shutdown
from zeroserver.orchestrator import searching
from zeroserver.orchestrator.cluster.slurm import check_pool_holds
from zeroserver.orchestrator.experiments import move_experiment, resource_columns
from zeroserver.orchestrator.scheduling import schedule
from zeroserver.orchestrator.searching import Event
from zeroserver.orchestrator.state import Orchestrator, config_of
from zeroserver.orchestrator.trials import (
    DELETED,
    carry_out,
    drop_backlog,
    reopen_trial,
    reopen_trials,
)
from zeroserver.orchestrator.unit_of_work import UnitOfWork
from zeroserver.orchestrator.warm_start import newest_checkpoint, source_problem
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_ENDED,
    EXPERIMENT_STOPPING,
    TRIAL_ACTIONS,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
)
from zeroserver.store.rows import one
from zeroserver.store.schema import checkpoints, experiments, trials

if TYPE_CHECKING:  # loaded when the first experiment comes
    from zerolab.config import ExperimentConfig

__all__ = [
    "Continuation",
    "continue_experiment",
    "continue_trial",
    "prepare_continuation",
    "why_through",
]


@dataclass(frozen=True)
class Continuation:
    """How an experiment shall go on; its new configuration has been checked."""

    config: "ExperimentConfig"
    raw_config: Mapping[str, Any]
    """As submitted, with the changes laid over it."""
    seen: str
    """The submitted configuration to which they were made, as it is stored."""
    activate: bool = True


def continue_experiment(work: UnitOfWork, experiment_id: int, wish: Continuation) -> None:
    """Let an experiment that has ended go on; one that goes on already stays as it is.

    Raises:
        NotFoundError: If there is no such experiment.
        ConflictError: If it has not ended, or nothing of it is left that could go on.
        ConfigError: If what changes is what its trials came from.
    """
    experiment = work.find(experiments, experiment_id)
    action = EXPERIMENT_ACTIONS["continue"]
    changed = msgspec.json.decode(experiment["raw_config"]) != wish.raw_config
    if not action.wanted("experiment", experiment_id, experiment["state"]):
        if changed:
            msg = (
                f"experiment {experiment_id}: is {experiment['state']}, and its configuration "
                f"changes only when it has ended; `zerolab experiment cancel {experiment_id}` first"
            )
            raise ConflictError(msg)
        return
    _refuse_while_deleted(experiment)
    if experiment["raw_config"] != wish.seen:
        msg = f"experiment {experiment_id}: was changed by someone else meanwhile; ask again"
        raise ConflictError(msg)
    drop_backlog(work, experiment_id)
    before = work.config(experiment_id)
    wish = _settled(wish, before)
    problems = list(_problems(before, wish.config, experiment_id))
    if problems:
        raise ConfigError("experiment", problems)
    ended = _ended(work, experiment_id)
    known_ends = searching.known_ends(work, experiment_id)
    longer = _is_longer(before, wish.config)
    opened = [
        trial
        for trial in ended
        if _is_unfinished(trial, longer=longer)
        and (wish.config.searcher.rebuilds_on_growth or trial["request_id"] not in known_ends)
    ]
    grows = _grows(before, wish.config)
    wanted: Sequence[Operation] = []
    if grows:  # the searcher keeps its former bounds until it has been told all ends
        searching.restore(work, experiment_id)
    else:
        _store(work, experiment, wish)
        operations = searching.replay(work, experiment_id)
        wanted = _not_carried_out(work, experiment_id, operations)
        searches = any(isinstance(each, Create) for each in wanted)
        if not opened and not searches and not _awaits_operations(experiment):
            raise ConflictError(_nothing_left(experiment, wish.config))
        _refuse_without_weights(work, experiment, opened)
    state = ExperimentState.ACTIVE if wish.activate else ExperimentState.PAUSED
    searches_on = grows or any(isinstance(each, Create) for each in wanted)
    move_experiment(
        work, experiment, state, ended_at=None, error=None, archived=0, searcher_done=0,
        # A search that goes on says by itself how far it is.
        progress=0.0 if searches_on else 1 - len(opened) / max(experiment["num_trials"], 1),
    )  # fmt: skip
    _refuse_without_checkpoint(work, opened)
    reopen_trials(work, experiment_id, opened, state)
    carry_out(work, experiment_id, wanted)
    events = [
        *_ends_of_the_rest(ended, {trial["id"] for trial in opened}, known_ends),
        *_ends_of_deleted(work, experiment_id, known_ends),
    ]
    told = searching.tell_ends(work, experiment_id, events)
    carry_out(work, experiment_id, told)
    if grows:
        _store(work, experiment, wish)
        _grow(work, experiment, before, wish.config, opened=bool(opened))
    schedule(work)


def _refuse_while_deleted(experiment: RowMapping) -> None:
    """Let nothing of an experiment continue of which a part is deleted.

    Raises:
        ConflictError: If it is one.
    """
    if experiment["deleting"]:
        experiment_id = experiment["id"]
        msg = (
            f"experiment {experiment_id}: is being deleted; run `zerolab experiment delete "
            f"{experiment_id}` again if that was interrupted"
        )
        raise ConflictError(msg)


def prepare_continuation(
    orchestrator: Orchestrator, connection: Connection, experiment_id: int, wish: Continuation
) -> None:
    """Replay the search of an experiment in a reader's thread, before it is continued.

    Args:
        orchestrator: Settings and caches; used in any thread.
        connection: Only read from.
        experiment_id: Experiment that :func:`continue_experiment` is called for next.
        wish: How it shall continue.
    """
    experiment = one(connection, experiments, experiment_id)
    if experiment["state"] not in EXPERIMENT_ENDED:
        return
    before = config_of(experiment)
    wish = _settled(wish, before)
    if any(_problems(before, wish.config, experiment_id)):
        return
    config = before if _grows(before, wish.config) else wish.config
    searching.prepare_replay(orchestrator, connection, experiment_id, config.searcher)


def _grows(before: "ExperimentConfig", after: "ExperimentConfig") -> bool:
    """Check whether the searcher that there is gets greater bounds."""
    return not after.searcher.rebuilds_on_growth and before.searcher != after.searcher


def _grow(
    work: UnitOfWork,
    experiment: RowMapping,
    before: "ExperimentConfig",
    after: "ExperimentConfig",
    *,
    opened: bool,
) -> None:
    """Tell the searcher of its greater bounds, and carry out what it wants then.

    Raises:
        ConflictError: If nothing follows, and no trial was opened.
    """
    lost = _without_checkpoint(work, experiment["id"])
    wanted = searching.grow(work, experiment["id"], before.searcher, lost)
    if not opened and not any(isinstance(each, Create | Continue) for each in wanted):
        raise ConflictError(_nothing_left(experiment, after))
    work.save(experiments, experiment["id"], searcher_done=0)
    carry_out(work, experiment["id"], wanted)


def _without_checkpoint(work: UnitOfWork, experiment_id: int) -> set[int]:
    """The searcher's numbers of the trials that could not go on where they were, or are gone."""
    there = select(checkpoints.c.trial_id).where(
        checkpoints.c.experiment_id == experiment_id, checkpoints.c.state == "COMPLETED"
    )
    query = select(trials.c.request_id).where(
        trials.c.experiment_id == experiment_id,
        trials.c.state.not_in(TRIAL_ENDED) | trials.c.id.in_(there),
    )
    able = set(work.connection.scalars(query))
    return searching.created(work, experiment_id) - able


def continue_trial(work: UnitOfWork, trial_id: int) -> None:
    """Let a trial that has ended short of its length go on, and its experiment with it.

    Raises:
        NotFoundError: If there is no such trial.
        ConflictError: If it has not ended, has nothing left to do, its searcher is through with
            it, or the weights that it would begin with are gone.
    """
    trial = work.find(trials, trial_id)
    if not TRIAL_ACTIONS["continue"].wanted("trial", trial_id, trial["state"]):
        return
    experiment = work.experiment_of(trial)
    home = experiment["id"]
    _refuse_while_deleted(experiment)
    if experiment["state"] in EXPERIMENT_STOPPING:
        msg = (
            f"trial {trial_id}: its experiment {home} is {experiment['state']}; wait until it has "
            "ended, then ask again"
        )
        raise ConflictError(msg)
    why = why_through(work, trial) or _no_weights(work, trial)
    if why is not None:
        msg = f"trial {trial_id}: is {trial['state']} and cannot be continued: {why}"
        raise ConflictError(msg)
    state = ExperimentState(experiment["state"])
    alone: dict[str, Any] = {}
    if state in EXPERIMENT_ENDED:
        state = ExperimentState.ACTIVE
        alone = {"waits": 0, "until": None}
        # What was ended searches no more: only this trial goes on.
        move_experiment(
            work, experiment, state, ended_at=None, error=None, archived=0, searcher_done=1,
        )  # fmt: skip
    reopen_trial(work, trial, state, **alone)
    schedule(work)


def why_through(work: UnitOfWork, trial: RowMapping) -> str | None:
    """Say why a trial that has ended has no training left, and what can be done; None if it has."""
    number, home = trial["id"], trial["experiment_id"]
    searcher = work.config(home).searcher
    known_ends = set() if searcher.rebuilds_on_growth else searching.known_ends(work, home)
    through = trial["request_id"] in known_ends
    if not through and _is_unfinished(trial, longer=False):
        return None
    why = (
        f"the {searcher.name} searcher is through with it" if through or trial["stop"] else
        "it has trained to its length"
    )  # fmt: skip
    if newest_checkpoint(work, number) is None:
        return (
            f"{why}, and no checkpoint of it is left; `zerolab experiment fork {home}` begins anew"
        )
    ways = (
        f"`zerolab trial fork {number}` trains on from its checkpoint as an experiment of its own"
    )
    if searcher.has_one_trial:
        ways += (
            f", `zerolab experiment continue {home} --set searcher.max_length.batches=...` to "
            "a greater length"
        )
    return f"{why}; {ways}"


def _no_weights(work: UnitOfWork, trial: RowMapping) -> str | None:
    """Say that a trial without a checkpoint has lost the one that it began with; None if not."""
    latest = trial["latest_checkpoint"] or newest_checkpoint(work, trial["id"])
    problem = source_problem(work, {**trial, "latest_checkpoint": latest})
    if problem is None:
        return None
    return f"{problem}, and it has none of its own; {_other_weights(trial['experiment_id'])}"


def _other_weights(experiment_id: int) -> str:
    return (
        f"`zerolab experiment fork {experiment_id}` begins anew, with another "
        "searcher.source_checkpoint_uuid"
    )


def _settled(wish: Continuation, before: "ExperimentConfig") -> Continuation:
    """With what follows for the searcher from what it was, where it is still the same one."""
    section = wish.config.searcher
    if section.name != before.searcher.name:
        return wish
    from zerolab.searcher.factory import read_section  # loaded when the first experiment comes

    # Read again: what follows may be more than a section can hold.
    settled = read_section(section.with_derived_fields(before.searcher).model_dump(mode="json"))
    followed = {
        field: value
        for field, value in settled.model_dump(mode="json").items()
        if value != section.model_dump(mode="json")[field]
    }
    raw = {**wish.raw_config, "searcher": {**wish.raw_config["searcher"], **followed}}
    config = wish.config.model_copy(update={"searcher": settled})
    return replace(wish, config=config, raw_config=raw)


def _problems(
    before: "ExperimentConfig", after: "ExperimentConfig", experiment_id: int
) -> Iterator[str]:
    """What of the changes would make the trials that there are other ones."""
    was, will_be = before.to_dict(), after.to_dict()
    secrets = find_secrets(was) + find_secrets(will_be)
    for path, old, new in _changes(was, will_be):
        block, _, rest = path.partition(".")
        field = rest.partition(".")[0]
        fixed = block in _FIXED or (block == "checkpoint_storage" and not field.startswith("save_"))
        if block == "searcher":
            fixed = field not in after.searcher.growable_fields | after.searcher.derived_fields
        if path == _SEED and new is None:
            continue  # it stands in no file: the server has chosen it
        if fixed:
            yield (
                f"{path}: must stay as it is when an experiment goes on: "
                f"{mask_values(repr(old), secrets)}, got {mask_values(repr(new), secrets)}; "
                f"`zerolab experiment fork {experiment_id}` begins anew with it"
            )
    if after.searcher.name == before.searcher.name:
        yield from after.searcher.growth_problems(before.searcher)


_FIXED = frozenset({"hyperparameters", "reproducibility", "entrypoint"})
_SEED = "reproducibility.experiment_seed"


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if path or key != "log_policies":
                below = f"{path}.{key}" if path else key
                yield from _changes(old.get(key), new.get(key), below)
    elif old != new:
        yield path, old, new


def _is_longer(before: "ExperimentConfig", after: "ExperimentConfig") -> bool:
    old, new = before.searcher.max_length, after.searcher.max_length
    return old is not None and new is not None and new.count > old.count


def _store(work: UnitOfWork, experiment: RowMapping, wish: Continuation) -> None:
    check_pool_holds(work.connection, wish.config)
    searching.check_custom_class(work.orchestrator, wish.config)
    resolved = wish.config.to_dict()
    resolved["reproducibility"]["experiment_seed"] = experiment["seed"]
    work.save(
        experiments, experiment["id"],
        config=msgspec.json.encode(mask_secrets(resolved)).decode(),
        raw_config=msgspec.json.encode(wish.raw_config).decode(),
        **resource_columns(wish.config),
    )  # fmt: skip
    work.orchestrator.forget_config(experiment["id"])


def _ended(work: UnitOfWork, experiment_id: int) -> list[RowMapping]:
    query = select(trials).where(
        trials.c.experiment_id == experiment_id, trials.c.state.in_(TRIAL_ENDED)
    )
    return list(work.connection.execute(query.order_by(trials.c.id)).mappings())


def _awaits_operations(experiment: RowMapping) -> bool:
    """Whether a program outside of the server may yet want trials."""
    return experiment["searcher_name"] == "custom" and not experiment["searcher_done"]


def _is_unfinished(trial: RowMapping, *, longer: bool) -> bool:
    """Whether there is training left that a trial has not done."""
    if trial["stop"] == "searcher":
        return False
    if trial["state"] == TrialState.COMPLETED:
        return longer and trial["error"] is None  # else its hyperparameters are impossible
    return True


def _not_carried_out(
    work: UnitOfWork, experiment_id: int, operations: list[Operation]
) -> list[Operation]:
    there = searching.created(work, experiment_id)
    return [
        each
        for each in operations
        if isinstance(each, Shutdown) or (isinstance(each, Create) and each.trial_id not in there)
    ]


def _nothing_left(experiment: RowMapping, config: "ExperimentConfig") -> str:
    number = experiment["id"]
    ways = [
        f"`zerolab experiment continue {number} --set searcher.{field}=...` with more than before"
        for field in sorted(config.searcher.growable_fields)
    ] or [f"`zerolab experiment fork {number}` begins anew, `zerolab trial fork` from one trial"]
    return (
        f"experiment {number}: is {experiment['state']}, and nothing of it is left that could go "
        f"on; {', or '.join(ways)}"
    )


def _refuse_without_checkpoint(work: UnitOfWork, opened: list[RowMapping]) -> None:
    """Let no trial that has trained to its length begin anew, and lose what it reported."""
    lost = [
        str(trial["id"])
        for trial in opened
        if trial["state"] == TrialState.COMPLETED and newest_checkpoint(work, trial["id"]) is None
    ]
    if lost:
        msg = (
            f"trial {', '.join(lost[:8])}: has no checkpoint left to go on from "
            "(checkpoint_storage.save_trial_latest keeps one); fork the experiment instead"
        )
        raise ConflictError(msg)


def _refuse_without_weights(
    work: UnitOfWork, experiment: RowMapping, opened: list[RowMapping]
) -> None:
    """Let no experiment go on of which every trial would begin with a checkpoint that is gone."""
    number = experiment["id"]
    problem = source_problem(work, {**experiment, "latest_checkpoint": None})
    if problem is not None and all(_no_weights(work, trial) for trial in opened):
        msg = f"experiment {number}: cannot be continued: {problem}; {_other_weights(number)}"
        raise ConflictError(msg)


def _ends_of_the_rest(
    ended: list[RowMapping], opened: set[int], known_ends: set[int]
) -> Iterator[Event]:
    """Yield the ends of trials of which the searcher was not told, and that stay as they are."""
    for trial in ended:
        if trial["id"] in opened or trial["request_id"] in known_ends:
            continue
        number = trial["request_id"]
        if trial["state"] == TrialState.COMPLETED:
            yield Event("exited", number)
        else:
            failed = trial["state"] == TrialState.ERROR
            yield Event("exited_early", number, reason="errored" if failed else "user_canceled")


def _ends_of_deleted(work: UnitOfWork, experiment_id: int, known_ends: set[int]) -> Iterator[Event]:
    """Yield the ends of trials that were deleted before the searcher knew that they had ended."""
    query = select(trials.c.request_id).where(trials.c.experiment_id == experiment_id)
    there = set(work.connection.scalars(query))
    for number in sorted(searching.created(work, experiment_id) - there - known_ends):
        yield Event("exited_early", number, reason=DELETED)
