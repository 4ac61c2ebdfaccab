"""The loop of a trial: train, report, validate, checkpoint, and stop when it must.

It goes from one *stop* to the next: a stop is a batch after which something is due
(:class:`zerotrial.loop.units.Schedule`), or after which the ranks agree whether to go on. In
between there is nothing but the user's ``train_batch``.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from zerolab.contract.wire import Extension
from zerolab.core.length_extension import ask_to_go_on
from zerolab.core.machine_metrics import Machines
from zerolab.core.preemption import DirectivePoller, SigtermFlag
from zerolab.errors import TrialError
from zerolab.reports.reporter import Reporter
from zerotrial.callbacks import CallbackList
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.data.batch_iterators import EmptyFeed
from zerotrial.data.samplers import derive_seed
from zerotrial.loop.batch_checks import BatchChecks, GivenAnIterator
from zerotrial.loop.checkpoints import CheckpointKeeper, SavedState
from zerotrial.loop.console import Console
from zerotrial.loop.metrics import Entry
from zerotrial.loop.profiling import LoopTimings
from zerotrial.loop.recorder import Recorder
from zerotrial.loop.settings import FitSettings
from zerotrial.loop.skipped_steps import SkippedSteps
from zerotrial.loop.stop_reason import Ending, Wishes
from zerotrial.loop.training_data import agree_on_epoch_length, make_training_feed
from zerotrial.loop.units import Schedule
from zerotrial.loop.validation import ValidationInterruptedError, Validator
from zerotrial.trial import ZeroTrial

__all__ = ["Controller"]

logger = logging.getLogger(__name__)

_AGREE_EVERY_S = 1.0
"""How often, about, the ranks agree whether to go on; seconds of training."""
_MOST_BATCHES_BETWEEN = 10_000
_EARLY_BATCHES = 100
"""Batches that are reported at least every 5 s, however slow they are."""


def _single(metrics: dict[str, float]) -> float | None:
    """Return the only metric, if there is one alone."""
    return next(iter(metrics.values())) if len(metrics) == 1 else None


class Controller:
    """Runs one trial on one rank; every rank runs one, in step with the others.

    Args:
        trial: The user's.
        context: Its context, with an engine wrapped.
        settings: How far and how often.
        reporter: Of the run; ``None`` on all ranks but the chief.
        poller: Tells when to stop; on ranks other than the chief the flag of SIGTERM.

    Raises:
        TrialError: If the trial has wrapped no engine, or its loaders cannot be used.
        ConfigError: If a length cannot be turned into batches.
    """

    def __init__(
        self,
        trial: ZeroTrial,
        context: ZeroTrialContext,
        settings: FitSettings,
        reporter: Reporter | None,
        poller: DirectivePoller | SigtermFlag | None = None,
    ) -> None:
        if not context.models:
            raise TrialError(
                f"{type(trial).__name__}.__init__: must wrap an engine with "
                "context.wrap_model_engine(zerotrial.initialize(...)[0])"
            )
        self._trial = trial
        self._context = context
        self._settings = settings
        self._wishes = Wishes(context, poller)
        self._reporter = reporter
        self._distributed = context.distributed
        self._callbacks = CallbackList(trial.build_callbacks())

        # Data
        self._feed = make_training_feed(trial, context)
        epoch_length = agree_on_epoch_length(self._feed, settings, context)
        self._schedule: Schedule = settings.schedule(epoch_length)
        context.begin_training(self._schedule.epoch_length)
        self._validator = Validator(
            trial,
            context,
            self._callbacks,
            one_batch=settings.test_mode,
            wish=self._wishes.to_interrupt,
        )
        self._keeper = CheckpointKeeper(trial, context, self._callbacks, reporter)

        # Batches, and what has been done after which
        self.steps = 0
        self._reported_at = 0
        self._validated_at = -1
        self._checkpointed_at = -1
        self._best: float | None = None
        self._saved_random_state: dict[str, Any] | None = None

        # What is told, and when the ranks agree next; nothing here decides what is computed
        self._agree_at = 1
        self._timings = LoopTimings(settings.profiling, context.device)
        self._recorder = Recorder(context, self._callbacks, self._timings, reporter)
        self._machines: Machines | None = None

        # One batch
        self._checks = BatchChecks(context, self._feed)
        self._written_for = GivenAnIterator(trial.train_batch)
        self._skipping = SkippedSteps(context.engines)

    def show_progress(self) -> Console:
        """Have the console told what is reported; for a script without a platform."""
        run_dir = Path(self._context.spec.run_dir)
        self._recorder.console = Console(run_dir, self._schedule.max_steps)
        return self._recorder.console

    @property
    def last_checkpoint(self) -> str | None:
        """Where the last checkpoint lies that this run has saved, or began with; None for none."""
        return self._keeper.last

    def run(self) -> Ending:
        """Train to the end, or until told to stop. **Collective**.

        Returns:
            Why it ended.
        """
        spec = self._context.spec
        ref = spec.latest_checkpoint
        with ExitStack() as closing:
            first = ref.steps_completed if ref is not None else 0
            closing.callback(self._callbacks.call, "on_trial_shutdown")
            self._callbacks.call("on_trial_startup", first, ref.uuid if ref is not None else None)
            self._machines = Machines(self._distributed)
            closing.callback(self._machines.close)
            closing.enter_context(self._keeper.swept())
            if ref is not None:
                self._recorder.state("restoring")
                self._restore(self._keeper.load(ref))
            self._recorder.begin(self.steps)
            for model in self._context.models:
                model.train()
            self._callbacks.call("on_training_start")
            if self._context.profiler is not None:
                closing.enter_context(self._context.profiler)
            self._seed()
            try:
                return self._loop()
            except ValidationInterruptedError as told:
                return self._leave(Ending(told.wish))

    # The loop

    def _loop(self) -> Ending:
        if self._settings.initial_validation and self.steps == 0 and self._validated_at < 0:
            self._validate()
        self._attend()
        self._recorder.state("training")
        while True:
            ending = self._train_to_the_bound()
            if ending is not Ending.FINISHED:
                return self._leave(ending)
            ending = self._agree(last=True)
            if not self._schedule.pauses:
                return Ending.FINISHED
            if ending is not Ending.FINISHED or not self._is_extended():
                told = "trained to batch %d, as far as the searcher let it: pausing"
                logger.info(told, self.steps)
                return Ending.REACHED

    def _train_to_the_bound(self) -> Ending:
        """Train as far as this run shall, or until it must end."""
        while not self._schedule.finished(self.steps):
            self._train_until(min(self._schedule.next_stop(self.steps), self._agree_at))
            self._report_if_due()
            if self.steps >= self._agree_at:
                ending = self._agree()
                if ending is not Ending.FINISHED:
                    return ending
            self._attend()
        return Ending.FINISHED

    def _is_extended(self) -> bool:
        """Whether the searcher has let the trial go on meanwhile, and its slots are free for it."""
        until, length = self._settings.until, self._schedule.epoch_length
        if until is None or not isinstance(until.value, int):
            return False
        told: Extension | None = None
        if self._reporter is not None:
            told = ask_to_go_on(self._context.spec, self._reporter, until.value)
        told = self._distributed.broadcast(told, "agreeing to go on beyond the bound")
        if told is None or not told.goes_on:
            return False
        further = None if told.until is None else type(until)(told.until)
        self._settings = replace(self._settings, until=further)
        self._schedule = self._settings.schedule(length)
        logger.info("the searcher lets it go on at once, to batch %d", self._schedule.end)
        return True

    def _train_until(self, stop: int) -> None:
        """Train up to ``stop`` batches in all; they lie in one epoch."""
        schedule, context, unreported = self._schedule, self._context, self._recorder.unreported
        train_batch, batches = self._trial.train_batch, self._batches()
        context.set_default_data(batches)
        timings = self._timings if self._settings.profiling.enabled else None
        profiler, look = context.profiler, self._skipping.look
        first = step = self.steps
        epoch = schedule.epoch(step)
        calls = range(self._checks.calls_per_batch)
        self._checks.begin()
        if schedule.epoch_ends(step) or step == 0:
            self._callbacks.call("on_training_epoch_start", epoch)
        started = time.perf_counter()
        while step < stop:
            context.enter_batch(step)
            if timings is not None:
                timings.begin(step)
            with self._written_for:
                for _ in calls:
                    unreported.add(step + 1, train_batch(batches, epoch, step))
            step += 1
            self.steps = step
            look(step)
            if timings is not None:
                timings.end()
            if profiler is not None:
                profiler.step()
        self._recorder.trained_s += time.perf_counter() - started
        self._checks.end(stop - first)
        if schedule.epoch_ends(step):
            self._callbacks.call("on_training_epoch_end", epoch)

    def _attend(self) -> None:
        """Do what is due after this batch and has not been done yet."""
        self._report_if_due()
        schedule, steps = self._schedule, self.steps
        if schedule.validation_due(steps) and self._validated_at != steps:
            self._validate()
        if schedule.checkpoint_due(steps) and self._checkpointed_at != steps:
            self._checkpoint()

    def _leave(self, ending: Ending) -> Ending:
        if ending is Ending.STALE:
            logger.warning("another run has taken this trial over: this one stops")
            return ending
        left = self._wishes.seconds_left
        within = f", within {left:.0f} s" if left is not None else ""
        logger.info("told to end after batch %d (%s)%s", self.steps, ending.name.lower(), within)
        if self._checkpointed_at != self.steps:
            self._checkpoint()
        self._keeper.finish()
        return ending

    # Agreement

    def _agree(self, *, last: bool = False) -> Ending:
        """Decide together whether to go on, and when to ask again. **Collective**.

        Args:
            last: There is nothing to go on with; only tell what is left to tell.
        """
        if last:
            self._keeper.finish()
        self._recorder.speed(self.steps, self._schedule.max_steps)
        sample = self._machines.take(now=last) if self._machines is not None else None
        early = self._settings.early_reports and self.steps < _EARLY_BATCHES and not last
        overdue = early and self._recorder.is_overdue()
        mine = (
            int(self._wishes.now()),
            self._recorder.batch_s,
            sample,
            self._keeper.ready,
            overdue,
        )
        operation = f"agreeing to go on after batch {self.steps}"
        told = self._distributed.allgather(mine, operation)
        wishes, seconds, samples, ready, reports = zip(*told, strict=True)
        if any(reports):
            self._recorder.preview(self.steps)
        if all(ready):
            self._keeper.advance()
        if self._machines is not None:
            self._recorder.machines(self.steps, self._machines.named(samples))
        pause = int(_AGREE_EVERY_S / max((*seconds, 1e-9)))
        self._agree_at = self.steps + min(max(1, pause), _MOST_BATCHES_BETWEEN)
        return Ending(max(wishes))

    # What is due

    def _report_if_due(self) -> None:
        if self._schedule.report_due(self.steps) and self._reported_at != self.steps:
            self._recorder.training(self.steps, self._schedule.max_steps)
            self._reported_at = self.steps

    def _validate(self) -> None:
        self._recorder.state("validating")
        metrics = self._validator.run()
        first, self._validated_at = self._validated_at < 0, self.steps
        value = metrics.get(self._settings.metric or "")
        improved = self._settings.improves(value, self._best)
        if improved:
            self._best = value
        length = self._schedule.epoch_length
        self._recorder.validation(self.steps, self.steps / length if length else None, metrics)
        if self.steps > 0:
            self._step_plateaus(value if self._settings.metric else _single(metrics))
        if self._settings.metric and value is None:
            self._miss(self._settings.metric, metrics, first=first)
        policy = self._settings.checkpoint_policy
        wanted = policy == "all" or (policy == "best" and (improved or not self._settings.metric))
        if wanted and self.steps > 0 and self._checkpointed_at != self.steps:
            self._checkpoint()
        self._recorder.state("training")

    def _step_plateaus(self, value: float | None) -> None:
        """Step the schedules that follow the validation metric."""
        for engine in self._context.models:
            schedule = getattr(engine, "lr_scheduler", None)
            if isinstance(schedule, ReduceLROnPlateau) and value is not None:
                schedule.step(value)

    def _miss(self, metric: str, metrics: dict[str, float], *, first: bool) -> None:
        """Say that a validation lacks the searcher's metric; the first one must not.

        Raises:
            TrialError: If it is the first one: the search could never decide anything.
        """
        names = ", ".join(sorted(metrics)) or "none"
        text = (
            f"searcher.metric: must be one of the validation metrics, got {metric!r}; "
            f"there are: {names}"
        )
        if not metrics:
            text += (
                "; the validation gave no metric at all: check that its loader gives batches and "
                "that evaluate_batch returns a dict with the metric"
            )
        if first:
            raise TrialError(text)
        logger.warning(text)

    def _checkpoint(self) -> None:
        self._recorder.state("checkpointing")
        before, self._checkpointed_at = self._checkpointed_at, self.steps
        try:
            self._keeper.save(self._state_to_save())
        except BaseException:
            self._checkpointed_at = before
            raise
        self._recorder.state("training")

    # State

    def _state_to_save(self) -> dict[str, Any]:
        return {
            "trial_id": self._context.spec.trial_id,
            "world_size": self._distributed.size,
            "steps_completed": self.steps,
            "reported_at": self._reported_at,
            "validated_at": self._validated_at,
            "checkpointed_at": self._checkpointed_at,
            "best": self._best,
            "window": self._recorder.unreported.state(),
            "feed": self._feed.state(),
            "random": random_state.capture(),
        }

    def _restore(self, saved: SavedState) -> None:
        if self._context.warm_start:
            logger.info("warm start: weights of trial %s", saved.shared["trial_id"])
            return
        shared = saved.shared
        self.steps = shared["steps_completed"]
        self._agree_at = self.steps + 1
        self._reported_at = shared["reported_at"]
        self._validated_at = shared["validated_at"]
        self._checkpointed_at = self.steps
        self._best = shared["best"]
        entries: list[Entry] = list(saved.mine["window"]) if saved.mine is not None else []
        if self._distributed.is_chief:
            for lost in saved.of_lost_ranks(self._distributed.size):
                entries += lost["window"]
        self._recorder.unreported.restore(entries)
        mine = saved.mine if saved.mine is not None else shared
        # An inner pipeline stage has read nothing; the rank may be another one now.
        read_none = mine["feed"]["kind"] == "empty"
        self._feed.restore((shared if read_none else mine)["feed"])
        if saved.mine is not None and saved.world_size == self._distributed.size:
            self._saved_random_state = saved.mine["random"]
        logger.info("going on after batch %d", self.steps)

    def _seed(self) -> None:
        """Begin from the saved random state, or from one that follows from the seed and place."""
        if self._saved_random_state is not None:
            random_state.restore(self._saved_random_state)
            return
        rank = self._context.mpu.data_parallel_rank
        random_state.seed_everything(derive_seed(self._context.get_trial_seed(), rank, self.steps))

    # Helpers

    def _batches(self) -> Iterator[Any] | None:
        if isinstance(self._feed, EmptyFeed):
            return None
        batches = self._context.engines[0].timed_input(self._feed)
        return self._timings.timed(batches) if self._settings.profiling.enabled else batches
