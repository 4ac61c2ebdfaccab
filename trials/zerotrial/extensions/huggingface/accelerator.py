"""A script with an Accelerator as a trial: saving, resuming and leaving.

Only the script knows the position of its training loop. A trial therefore leaves when the script
saves its state, and resumes through the script's own code for an existing state. For this the
newest checkpoint is restored to the script's folder before the script looks there.
"""

import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerolab.core.context import Context
from zerotrial.extensions.huggingface import run
from zerotrial.extensions.huggingface.steps import STEPS

__all__ = ["around_backward", "around_init", "around_save_state", "around_step"]

logger = logging.getLogger(__name__)


def around_init(original: Callable[..., None]) -> Callable[..., None]:
    """Join the run, if there is one, with a tracker in every Accelerator."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        named = any(str(tracker) == "zerolab" for tracker in self.log_with)
        if run.experiment() is None:
            if named:
                run.join()  # every rank is here; trackers are made on one of them
            return
        context = run.join()
        if not named:
            from zerotrial.extensions.huggingface.tracker import ZerolabTracker

            self.trackers.append(ZerolabTracker())
        _put_back(context, self)

    return init


@functools.cache
def _state_of_trial(context: Context) -> Path | None:
    """Restore the trial's checkpoint to the script's folder, once. **Collective**."""
    latest = context.train.latest_checkpoint
    if latest is None:
        return None
    folder = context.checkpoint.get_metadata(latest.uuid).get("folder")
    if folder is None:
        return None  # a Trainer's: it puts it back itself
    run.put_back(context, latest.uuid, Path(folder))
    STEPS.before = latest.steps_completed
    logger.info("restored the state of batch %d to %s", latest.steps_completed, folder)
    return Path(folder)


def _put_back(context: Context, accelerator: Any) -> None:
    folder = _state_of_trial(context)
    named = re.fullmatch(r"checkpoint_(\d+)", folder.name) if folder is not None else None
    if named and accelerator.project_configuration.automatic_checkpoint_naming:
        accelerator.project_configuration.iteration = int(named.group(1)) + 1


def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count optimizer steps; log the reason why a trial that should leave continues."""

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_state.sync_gradients:
            _count(self)
        return original(self, *args, **kwargs)

    return step


def around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count the steps of an engine, which Accelerate takes here: its optimizer's do nothing."""

    @functools.wraps(original)
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.engine.global_steps  # which detects boundaries in every version of Accelerate
        result = original(self, *args, **kwargs)
        if self.engine.global_steps > before:
            _count(self.engine)
        return result

    return backward


def _count(stepping: object) -> None:
    STEPS.count(stepping)
    if STEPS.in_trainer or run.experiment() is None:
        return
    if run.join().preempt.requested_on_rank:
        _log_pending_preemption()


@functools.cache
def _log_pending_preemption() -> None:
    logger.warning(
        "the server preempts the trial at batch %d; it exits after the next "
        "accelerator.save_state(), and resumes from that state. Call save_state() more often to "
        "exit earlier",
        STEPS.completed,
    )


def around_save_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a trial checkpoint of the saved state; leave if requested. **Collective**."""

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved = original(self, *args, **kwargs)
        if run.experiment() is None:
            return saved
        context = run.join()
        folder = Path(saved)
        metadata = {"steps_completed": STEPS.completed, "framework": "accelerate"}
        run.store(context, folder, metadata | {"folder": str(folder)})
        any_reached = any(context.distributed.allgather(context.train.has_reached))
        if context.preempt.should_preempt() or any_reached:
            context.train.has_reached = any_reached
            run.leave(context)
        return saved

    return save_state
