"""Continuation of ended experiments, with changes of their configuration.

Trials continue from their newest checkpoints and keep their ids and curves. The searcher is created
again from the new configuration and all events. Operations that it now returns and that were not
executed before are executed.

The state of the experiment changes last. If there are too many trials to reopen in one transaction,
they are reopened before, in several transactions, as paused trials of an ended experiment. If the
server is killed in between, the same request completes the continuation.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import Connection, Select, func, select

from zerolab.contract.names import DEFAULT_PROJECT
from zerolab.contract.secret_text import mask_values
from zerolab.contract.secrets import find_secrets, mask_secrets
from zerolab.errors import ConfigError, ConflictError
from zerolab.searcher import Continue, Create, Operation, Shutdown
from zeroserver.orchestrator.cluster.slurm import check_pool_holds
from zeroserver.orchestrator.continuation import (
    ContinuationService,
    is_unfinished,
    other_weights,
    refuse_while_deleted,
)
from zeroserver.orchestrator.experiment_service import ExperimentService, resource_columns
from zeroserver.orchestrator.search.search_service import (
    DELETED,
    Event,
    check_custom_class,
    prepare_replay,
)
from zeroserver.orchestrator.search.warm_start import complete_checkpoint
from zeroserver.orchestrator.service import Uses
from zeroserver.orchestrator.state import Orchestrator, config_of
from zeroserver.states import (
    EXPERIMENT_ACTIONS,
    EXPERIMENT_ENDED,
    TRIAL_ENDED,
    ExperimentState,
    TrialState,
)
from zeroserver.store.database import raw_rows
from zeroserver.store.rows import ExperimentRow, TrialRow, find_row
from zeroserver.store.schema import checkpoints, experiments, trials

if TYPE_CHECKING:  # imported with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["Continuation", "ExperimentContinuation", "prepare_continuation"]


class Continuation(msgspec.Struct, frozen=True):
    """Continuation of an experiment, with its validated new configuration."""

    config: "ExperimentConfig"
    raw_config: Mapping[str, Any]
    """Submitted configuration merged with the changes."""
    seen: str
    """Stored configuration on which the changes are based, to detect concurrent changes."""
    activate: bool = True


_REOPENED_AT_ONCE = 3000
"""Maximum number of trials that one transaction reopens."""
_FIXED = frozenset({"hyperparameters", "reproducibility", "entrypoint"})
_SEED = "reproducibility.experiment_seed"


class ExperimentContinuation(ContinuationService):
    """Continues ended experiments."""

    experiments = Uses(ExperimentService)

    def continue_experiment(self, experiment_id: int, request: Continuation) -> None:
        """Continue an ended experiment; no effect if it already continues.

        Raises:
            NotFoundError: If there is no such experiment.
            ConflictError: If it has not ended, or has no training left.
            ConfigError: If a change would make its existing trials different.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        action = EXPERIMENT_ACTIONS["continue"]
        changed = msgspec.json.decode(experiment.raw_config) != request.raw_config
        if not action.wanted("experiment", experiment_id, experiment.state):
            if changed:
                msg = (
                    f"experiment {experiment_id}: is {experiment.state}, and its configuration "
                    "changes only when it has ended; "
                    f"`zerolab experiment cancel {experiment_id}` first"
                )
                raise ConflictError(msg)
            return
        refuse_while_deleted(experiment)
        if experiment.raw_config != request.seen:
            msg = f"experiment {experiment_id}: was changed by another request; retry"
            raise ConflictError(msg)
        self.operations.drop_backlog(experiment_id)
        before = self.work.config(experiment_id)
        request = _settled(request, before)
        problems = list(_problems(before, request.config, experiment_id))
        if problems:
            raise ConfigError("experiment", problems)
        ended = _read_trials(self.work.connection, experiment_id, TRIAL_ENDED)
        known_ends = self.searches.ended_trials(experiment_id)
        created = self.searches.created_trials(experiment_id)
        opened = _trials_to_reopen(ended, known_ends, before, request.config)
        paused = self.lifecycle.count_in(experiment_id, TrialState.PAUSED)
        reopens = bool(opened or paused)
        grows = _grows(before, request.config)
        pending: Sequence[Operation] = []
        if grows:  # the searcher keeps its former bounds until it has received all exits
            self.searches.restore(experiment_id)
        else:
            self._store(experiment, request)
            pending = _not_carried_out(self.searches.replay(experiment_id), created)
            searches = any(isinstance(operation, Create) for operation in pending)
            if not reopens and not searches and not _awaits_operations(experiment):
                raise ConflictError(_nothing_left(experiment, request.config))
            self._refuse_without_weights(experiment, opened)
        state = ExperimentState.ACTIVE if request.activate else ExperimentState.PAUSED
        searches_on = grows or any(isinstance(operation, Create) for operation in pending)
        self.lifecycle.move_experiment(
            experiment, state, ended_at=None, error=None, archived=0, searcher_done=0,
            # A search that continues reports its own progress.
            progress=0.0 if searches_on
            else 1 - (len(opened) + paused) / max(experiment.num_trials, 1),
        )  # fmt: skip
        self._refuse_without_checkpoint(experiment_id, opened)
        self.lifecycle.reopen_all(experiment_id, opened, state)
        if paused and request.activate:
            self.experiments.begin_to_apply_state(experiment_id)
        self.operations.execute(experiment_id, pending)
        events = [
            *_ends_of_the_rest(ended, {trial.id for trial in opened}, known_ends),
            *self._ends_of_deleted(experiment_id, created, known_ends),
        ]
        following = self.searches.add_events(experiment_id, events)
        self.operations.execute(experiment_id, following)
        if grows:
            self._store(experiment, request)
            self._grow(experiment, before, request.config, reopens=reopens)
        self.scheduling.schedule()

    def reopen_early(self, experiment_id: int, request: Continuation, part: range) -> None:
        """Reopen some trials as paused, before their experiment continues.

        No effect if the experiment was continued, changed or deleted concurrently.

        Args:
            experiment_id: Ended experiment.
            request: Its continuation.
            part: Ids of trials; ended trials with training left are reopened.
        """
        experiment = self.work.find(ExperimentRow, experiment_id)
        seen = experiment.raw_config == request.seen and not experiment.deleting
        if experiment.state not in EXPERIMENT_ENDED or not seen:
            return
        before = self.work.config(experiment_id)
        request = _settled(request, before)
        ended = _read_trials(self.work.connection, experiment_id, TRIAL_ENDED, part)
        known_ends = self.searches.ended_trials(experiment_id)
        opened = _trials_to_reopen(ended, known_ends, before, request.config)
        self.lifecycle.reopen_all(experiment_id, opened, ExperimentState.PAUSED)
        self.work.touch("experiment", experiment_id, experiment_id)

    def _grow(
        self,
        experiment: ExperimentRow,
        before: "ExperimentConfig",
        after: "ExperimentConfig",
        *,
        reopens: bool,
    ) -> None:
        """Grow the search and execute the searcher's operations.

        Raises:
            ConflictError: If no operation follows and no trial was reopened.
        """
        lost = self._without_checkpoint(experiment.id)
        operations = self.searches.grow(experiment.id, before.searcher, lost)
        if not reopens and not any(
            isinstance(operation, Create | Continue) for operation in operations
        ):
            raise ConflictError(_nothing_left(experiment, after))
        self.work.save(experiments, experiment.id, searcher_done=0)
        self.operations.execute(experiment.id, operations)

    def _without_checkpoint(self, experiment_id: int) -> Set[int]:
        """Return the request ids of trials without a checkpoint, including deleted trials."""
        query = select(trials.c.request_id).where(
            trials.c.experiment_id == experiment_id,
            trials.c.state.not_in(TRIAL_ENDED) | trials.c.id.in_(_with_checkpoint(experiment_id)),
        )
        able = set(self.work.connection.scalars(query))
        return self.searches.created_trials(experiment_id) - able

    def _store(self, experiment: ExperimentRow, request: Continuation) -> None:
        check_pool_holds(self.work.connection, request.config)
        check_custom_class(self.work.orchestrator, request.config, experiment.owner_id)
        resolved = request.config.to_dict()
        resolved["reproducibility"]["experiment_seed"] = experiment.seed
        self.work.save(
            experiments, experiment.id,
            config=msgspec.json.encode(mask_secrets(resolved)).decode(),
            raw_config=msgspec.json.encode(request.raw_config).decode(),
            **resource_columns(request.config),
        )  # fmt: skip
        self.work.orchestrator.configs.forget(experiment.id)

    def _refuse_without_checkpoint(
        self, experiment_id: int, opened: Sequence["_EndedTrial"]
    ) -> None:
        """Refuse to reopen a finished trial without a checkpoint."""
        lost = _finished_without_checkpoint(self.work.connection, experiment_id, opened)
        if lost:
            msg = (
                f"trial {', '.join(map(str, lost[:8]))}: has no checkpoint to continue from "
                "(checkpoint_storage.save_trial_latest keeps one); fork the experiment instead"
            )
            raise ConflictError(msg)

    def _refuse_without_weights(
        self, experiment: ExperimentRow, opened: Sequence["_EndedTrial"]
    ) -> None:
        """Refuse if all reopened trials would start from a missing checkpoint."""
        number = experiment.id
        uuid = experiment.source_checkpoint
        problem = None if uuid is None else self.warm_starts.checkpoint_problem(uuid)
        if problem is None:
            return
        reopened = [*opened, *_read_trials(self.work.connection, number, {TrialState.PAUSED})]
        saved: set[int] = set(self.work.connection.scalars(_with_checkpoint(number)))

        def lacks_weights(trial: _EndedTrial) -> bool:
            if trial.id in saved or trial.latest_checkpoint is not None:
                return False
            return trial.source_checkpoint == uuid or bool(
                self.no_weights(self.work.find(TrialRow, trial.id))
            )

        if all(map(lacks_weights, reopened)):
            msg = f"experiment {number}: cannot be continued: {problem}; {other_weights(number)}"
            raise ConflictError(msg)

    def _ends_of_deleted(
        self, experiment_id: int, created: Set[int], known_ends: Set[int]
    ) -> Iterator[Event]:
        """Yield exit events of deleted trials that the searcher has not received."""
        query = select(trials.c.request_id).where(trials.c.experiment_id == experiment_id)
        count = select(func.count()).where(trials.c.experiment_id == experiment_id)
        if self.work.connection.scalar(count) == len(created):
            return
        existing = set(self.work.connection.scalars(query))
        for number in sorted(created - existing - known_ends):
            yield Event("exited_early", number, reason=DELETED)


def _not_carried_out(operations: Iterable[Operation], created: Set[int]) -> list[Operation]:
    """Return the operations that shut down the search or create missing trials."""
    return [
        operation
        for operation in operations
        if isinstance(operation, Shutdown)
        or (isinstance(operation, Create) and operation.trial_id not in created)
    ]


class _EndedTrial(msgspec.Struct, frozen=True, gc=False):
    """Columns of an ended trial for a continuation; few, for a hundred thousand trials."""

    id: int
    request_id: int
    state: str
    stop: str | None
    error: str | None
    waits: int
    latest_checkpoint: str | None
    source_checkpoint: str | None


def _read_trials(
    connection: Connection,
    experiment_id: int,
    states: Collection[str],
    part: range | None = None,
) -> list[_EndedTrial]:
    """Return the trials of an experiment in some states, by id.

    Args:
        connection: Connection of the writer or a reader.
        experiment_id: Experiment of the trials.
        states: States of the trials.
        part: Range of their ids; None for all.
    """
    fields = ", ".join(_EndedTrial.__struct_fields__)
    marks = ", ".join("?" * len(states))
    query = f"SELECT {fields} FROM trials WHERE experiment_id = ? AND state IN ({marks})"  # noqa: S608
    values: tuple[Any, ...] = (experiment_id, *map(str, states))
    if part is not None:
        query += " AND id >= ? AND id < ?"
        values += (part.start, part.stop)
    return [_EndedTrial(*row) for row in raw_rows(connection, f"{query} ORDER BY id", values)]


def _trials_to_reopen(
    ended: Sequence[_EndedTrial],
    known_ends: Set[int],
    before: "ExperimentConfig",
    after: "ExperimentConfig",
) -> list[_EndedTrial]:
    """Return the ended trials that have training left.

    Args:
        ended: Ended trials.
        known_ends: Request ids of the trials whose exit the searcher has received.
        before: Former configuration of the experiment.
        after: Its new configuration.
    """
    longer = _is_longer(before, after)
    rebuilds = after.searcher.rebuilds_on_growth
    return [
        trial
        for trial in ended
        if is_unfinished(trial.state, trial.stop, trial.error, longer=longer)
        and (rebuilds or trial.request_id not in known_ends)
    ]


def _finished_without_checkpoint(
    connection: Connection, experiment_id: int, opened: Sequence[_EndedTrial]
) -> list[int]:
    """Return those of some trials that are finished and have no checkpoint."""
    finished = {trial.id for trial in opened if trial.state == TrialState.COMPLETED}
    if not finished:
        return []
    return sorted(finished.difference(connection.scalars(_with_checkpoint(experiment_id))))


def _with_checkpoint(experiment_id: int) -> Select[tuple[int]]:
    """Select the trials of an experiment that have a checkpoint."""
    return select(checkpoints.c.trial_id).where(
        checkpoints.c.experiment_id == experiment_id, checkpoints.c.state == "COMPLETED"
    )


def prepare_continuation(
    orchestrator: Orchestrator, connection: Connection, experiment_id: int, request: Continuation
) -> Sequence[range]:
    """Replay the search of an experiment in a reader thread, before it continues.

    Args:
        orchestrator: Settings and caches; used in any thread.
        connection: Connection for reading.
        experiment_id: Experiment to continue.
        request: Its continuation.

    Returns:
        Ranges of trial ids for :meth:`ExperimentContinuation.reopen_early`, one per transaction;
        empty if one transaction can reopen all trials or will refuse.
    """
    experiment = find_row(connection, ExperimentRow, experiment_id)
    if experiment.state not in EXPERIMENT_ENDED:
        return ()
    before = config_of(experiment)
    request = _settled(request, before)
    if any(_problems(before, request.config, experiment_id)):
        return ()
    config = before if _grows(before, request.config) else request.config
    replay = prepare_replay(orchestrator, connection, experiment_id, config.searcher)
    known_ends = set() if replay is None else replay.ends
    ended = _read_trials(connection, experiment_id, TRIAL_ENDED)
    source = experiment.source_checkpoint
    opened = _trials_to_reopen(ended, known_ends, before, request.config)
    if (
        len(opened) <= _REOPENED_AT_ONCE
        or experiment.deleting
        or experiment.raw_config != request.seen
        or (replay is not None and replay.problem is not None)
        or (source is not None and complete_checkpoint(connection, source) is None)
        or _finished_without_checkpoint(connection, experiment_id, opened)
    ):
        return ()
    check_pool_holds(connection, request.config)
    check_custom_class(orchestrator, request.config, experiment.owner_id)
    ids = [trial.id for trial in opened]
    firsts = ids[::_REOPENED_AT_ONCE]
    return [range(*ends) for ends in pairwise([*firsts, ids[-1] + 1])]


def _grows(before: "ExperimentConfig", after: "ExperimentConfig") -> bool:
    """Check whether the existing searcher gets greater bounds."""
    return not after.searcher.rebuilds_on_growth and before.searcher != after.searcher


def _settled(request: Continuation, before: "ExperimentConfig") -> Continuation:
    """Add the searcher fields derived from the former searcher, if its name is the same."""
    section = request.config.searcher
    if section.name != before.searcher.name:
        return request
    from zerolab.searcher.factory import read_section  # imported with the first experiment

    # Read again: derived fields may exceed the limits of a section.
    settled = read_section(section.with_derived_fields(before.searcher).model_dump(mode="json"))
    followed = {
        field: value
        for field, value in settled.model_dump(mode="json").items()
        if value != section.model_dump(mode="json")[field]
    }
    raw = {**request.raw_config, "searcher": {**request.raw_config["searcher"], **followed}}
    config = request.config.model_copy(update={"searcher": settled})
    return replace(request, config=config, raw_config=raw)


def _problems(
    before: "ExperimentConfig", after: "ExperimentConfig", experiment_id: int
) -> Iterator[str]:
    """Yield problems with changes that would make the existing trials different."""
    was, will_be = before.to_dict(), after.to_dict()
    secrets = find_secrets(was) + find_secrets(will_be)
    for path, old, new in _changes(was, will_be):
        block, _, remainder = path.partition(".")
        field = remainder.partition(".")[0]
        fixed = block in _FIXED or (block == "checkpoint_storage" and not field.startswith("save_"))
        if block == "searcher":
            fixed = field not in after.searcher.growable_fields | after.searcher.derived_fields
        if path == "project":
            yield (
                f"project: must not change when an experiment continues, got {new!r}; "
                f"use `zerolab project move {experiment_id} {new or DEFAULT_PROJECT}`"
            )
        if path == _SEED and new is None:
            continue  # chosen by the server, so no file has it
        if fixed:
            yield (
                f"{path}: must not change when an experiment continues: was "
                f"{mask_values(repr(old), secrets)}, got {mask_values(repr(new), secrets)}; "
                f"`zerolab experiment fork {experiment_id}` starts a new experiment with it"
            )
    if after.searcher.name == before.searcher.name:
        yield from after.searcher.growth_problems(before.searcher)


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


def _awaits_operations(experiment: ExperimentRow) -> bool:
    """Check whether an external program may still send operations."""
    return experiment.searcher_name == "custom" and not experiment.searcher_done


def _nothing_left(experiment: ExperimentRow, config: "ExperimentConfig") -> str:
    number = experiment.id
    ways = [
        f"`zerolab experiment continue {number} --set searcher.{field}=...` with more than before"
        for field in sorted(config.searcher.growable_fields)
    ] or [
        f"`zerolab experiment fork {number}` starts from the beginning, `zerolab trial fork` "
        "from a trial"
    ]
    return (
        f"experiment {number}: is {experiment.state}, and no trial can be "
        f"continued; {', or '.join(ways)}"
    )


def _ends_of_the_rest(
    ended: Sequence[_EndedTrial], opened: set[int], known_ends: Set[int]
) -> Iterator[Event]:
    """Yield exit events of trials that stay ended, unless the searcher has received them."""
    for trial in ended:
        if trial.id in opened or trial.request_id in known_ends:
            continue
        number = trial.request_id
        if trial.state == TrialState.COMPLETED:
            yield Event("exited", number)
        else:
            failed = trial.state == TrialState.ERROR
            yield Event("exited_early", number, reason="errored" if failed else "user_canceled")
