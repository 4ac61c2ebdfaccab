"""A Trainer as a trial: logging, saving, resuming and leaving.

The callback requests the experiment's actions (a validation at a rung, a checkpoint before a
pause), reports the Trainer's actions to the server, and ends the process after the last checkpoint
of a run. Results are bit-identical to undisturbed training: a Trainer's checkpoint has everything
it needs, and nothing is added to its computations.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import TrainOutput

from zerolab.core.context import Context
from zerolab.errors import ConfigError, NotFoundError, ZerolabError
from zerolab.formatting import first_few
from zerotrial.data import random_state
from zerotrial.extensions.huggingface import run
from zerotrial.extensions.huggingface.plan import Due, due_at
from zerotrial.extensions.huggingface.steps import STEPS
from zerotrial.extensions.huggingface.user_errors import note

__all__ = ["ZerolabCallback", "around_init", "around_train"]

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_MISFIT = "size mismatch for"


class _Leaving(SystemExit):
    """Ends ``Trainer.train`` after the last checkpoint of this run, and the script with it."""


class _Complete(BaseException):
    """Ends ``Trainer.train`` where all batches had been trained before this run began."""


class ZerolabCallback(TrainerCallback):  # type: ignore[misc]  # its types are skipped
    """Records a Trainer's metrics, and in an experiment its checkpoints; exits on preemption.

    One for each Trainer. ``report_to="zerolab"`` makes one; in an experiment each Trainer gets one
    without it.
    """

    def __init__(self) -> None:
        self._leaving = False
        self._validated: set[tuple[int, str]] = set()
        self._percent = -1
        self._best: tuple[int, str] | None = None
        self._resumed_at: int | None = None
        self._before_validation: dict[str, Any] | None = None
        self.can_validate = True
        """Whether the Trainer has validation data."""
        self.began = False
        """Whether everything is built, so that the next event is the first batch."""

    # -- where it begins ---------------------------------------------------------------------

    def begin(self, trainer: Any, context: Context) -> str | None:
        """Restore the trial's checkpoint to the Trainer's folder. **Collective**.

        Returns:
            The folder to resume from; None to start from scratch.

        Raises:
            ConfigError: If the checkpoint is not a Trainer's or has other shapes than the model, or
                if the searcher needs validations without validation data.
        """
        self.can_validate = trainer.eval_dataset is not None
        fit = context.info.fit
        if fit is not None and fit.validate_at and not self.can_validate:
            problem = f"must be given to the Trainer: the searcher compares trials by {fit.metric}"
            raise ConfigError("Trainer", [f"eval_dataset: {problem}"])
        latest = context.train.latest_checkpoint
        if latest is None:
            return None
        output = Path(trainer.args.output_dir)
        folder = output / f"checkpoint-{latest.steps_completed}"
        if latest.warm_start:
            folder = output / "warm-start"
        run.put_back(context, latest.uuid, folder)
        state = run.read_json_of(folder, _STATE)
        if latest.warm_start:  # another trial's weights, and nothing else of it
            _take_weights(trainer, folder, latest.uuid)
            return None
        self._resumed_at = int(state["global_step"])
        self._put_back_best(context, state, latest.uuid, output)
        return str(folder)

    def _put_back_best(
        self, context: Context, state: Mapping[str, Any], uuid: str, output: Path
    ) -> None:
        """``load_best_model_at_end`` reads the best checkpoint, which may be an older one."""
        step, at = state.get("best_global_step"), state["global_step"]
        if not state.get("best_model_checkpoint") or not step:
            return
        if step == at:
            self._best = (step, uuid)
            return
        best = context.checkpoint.get_metadata(uuid).get("best")
        if not best:
            return
        try:
            run.put_back(context, best, output / f"checkpoint-{step}")
        except NotFoundError as error:
            logger.warning("the best checkpoint so far, of batch %d, is missing: %s", step, error)
        else:
            self._best = (step, best)

    def on_train_begin(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Stop where nothing is left to train: a Trainer would train one batch more.

        Raises:
            _Complete: Then.
        """
        del args, control, unused
        self.began = True
        if self._resumed_at is not None and self._resumed_at >= state.max_steps:
            raise _Complete

    # -- what is due -------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Request the experiment's actions after this batch. **Collective**."""
        del args, unused
        self._before_validation = None
        context, steps = run.join(), int(state.global_step)
        self._tell_progress(context, steps, state.max_steps)
        last = steps >= state.max_steps
        due = due_at(context.info.fit, "batches", steps)
        if context.preempt.should_preempt() and not last:
            due = Due(due.validate, save=True, leave=True)
        if last and context.info.fit is not None:
            due = Due(validate=True, save=True)
        self._ask(control, due)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Request the experiment's actions after this epoch."""
        del args, unused
        fit = run.join().info.fit
        if not self._leaving and abs(state.epoch - round(state.epoch)) < 1e-6:
            self._ask(control, due_at(fit, "epochs", round(state.epoch)))

    def _ask(self, control: Any, due: Due) -> None:
        if due.validate and self.can_validate and not control.should_evaluate:
            control.should_evaluate = True
            self._before_validation = random_state.capture()
        control.should_save |= due.save
        self._leaving |= due.leave
        if control.should_save:
            control.should_log = True  # sums for the next log line are in no checkpoint

    def _tell_progress(self, context: Context, steps: int, of: int) -> None:
        percent = 100 * steps // max(1, of)
        if percent != self._percent:
            self._percent = percent
            context.train.report_progress(steps / max(1, of))

    # -- callbacks ---------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **unused: Any) -> None:
        """Record a line of the Trainer's log as training metrics."""
        del args, control, unused
        values = _numbers(logs)
        if values and not any(name.startswith("eval_") for name in values):
            run.join().train.report_training_metrics(int(state.global_step), values)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **unused: Any
    ) -> None:
        """Record a validation; of several after one batch, the first one of each metric."""
        del args, control, unused
        if self._before_validation is not None:
            # A loader draws a number when it begins: one that the script does not draw on its own.
            random_state.restore(self._before_validation)
        context, steps = run.join(), int(state.global_step)
        values = _numbers(metrics)
        new = {
            name: value for name, value in values.items() if (steps, name) not in self._validated
        }
        if not new.keys() - {"epoch"}:
            return  # the final evaluation of the best model, already reported
        self._validated |= {(steps, name) for name in values}
        fit = context.info.fit
        if fit is not None and fit.max_length is not None and fit.max_length.unit == "epochs":
            new["epochs"] = round(state.epoch or 0, 6)
        context.train.report_validation_metrics(steps, new)

    def on_save(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        """Make a trial checkpoint of the saved state. **Collective**.

        Raises:
            _Leaving: If it was the last checkpoint of this run.
        """
        del control, unused
        context, steps = run.join(), int(state.global_step)
        if run.experiment() is not None:
            folder = Path(args.output_dir) / f"checkpoint-{steps}"
            best_step = getattr(state, "best_global_step", None)
            best = self._best if self._best and self._best[0] == best_step else None
            metadata = {"steps_completed": steps, "framework": "transformers"}
            uuid = run.store(context, folder, metadata | ({"best": best[1]} if best else {}))
            if best_step == steps:
                self._best = (steps, uuid)
        if self._leaving:
            raise _Leaving


def around_init(original: Callable[..., None]) -> Callable[..., None]:
    """Give every Trainer of an experiment its callback."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if run.experiment() is not None and _callback_of(self) is None:
            self.add_callback(ZerolabCallback())

    return init


def around_train(original: Callable[..., Any]) -> Callable[..., Any]:
    """Resume a Trainer from the trial's checkpoint, and leave when its callback requests it."""

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callback = _callback_of(self)
        if callback is None:
            return original(self, resume_from_checkpoint, *args, **kwargs)
        context, spec = run.join(), run.experiment()
        STEPS.in_trainer = True
        try:
            if spec is not None:
                resume_from_checkpoint = callback.begin(self, context) or resume_from_checkpoint
            return original(self, resume_from_checkpoint, *args, **kwargs)
        except _Leaving:
            run.leave(context)
        except _Complete:
            return _already_trained(self)
        except ConfigError as error:
            if spec is not None:
                run.refuse(spec, error)
            raise
        except Exception as error:
            note(error, building=not callback.began)
            if isinstance(error, ZerolabError):
                run.best_effort_close(context, error)
            raise
        finally:
            STEPS.in_trainer = False

    return train


def _take_weights(trainer: Any, folder: Path, uuid: str) -> None:
    try:
        trainer._load_from_checkpoint(str(folder))  # noqa: SLF001 - as train() does
    except RuntimeError as error:
        misfits = [line.strip(" \t.") for line in str(error).splitlines() if _MISFIT in line]
        if not misfits:
            raise
        problem = (
            f"checkpoint {uuid}: {len(misfits)} of its tensors have other shapes than the model's: "
        )
        raise ConfigError("warm start", [problem + "; ".join(first_few(misfits))]) from error


def _already_trained(trainer: Any) -> TrainOutput:
    """End a training of no batches as the Trainer ends one."""
    state = trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        trainer._load_best_model()  # noqa: SLF001 - as train() does
    trainer.is_in_train = False
    losses = [row["loss"] for row in state.log_history if "loss" in row]
    return TrainOutput(state.global_step, losses[-1] if losses else 0.0, {})


def _callback_of(trainer: Any) -> ZerolabCallback | None:
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, ZerolabCallback)), None)


def _numbers(values: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in (values or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
