"""Callbacks of a trial's training loop."""

import logging
from collections.abc import Mapping
from typing import Any

from zerolab.errors import TrialError
from zerolab.replacements import replacements
from zerolab.schema.section import suggest

__all__ = ["Callback", "CallbackList"]

logger = logging.getLogger(__name__)


class Callback:
    """Base class of callbacks; override the methods that you need.

    Every method runs on every rank and does nothing by default. Return instances from
    ``ZeroTrial.build_callbacks``. Checkpoints store their ``state_dict`` under that name.

    Example:
        >>> class PrintEpochs(zerotrial.Callback):
        ...     def on_training_epoch_end(self, epoch_idx):
        ...         print(f"epoch {epoch_idx} finished")
        >>> class MyTrial(zerotrial.ZeroTrial):
        ...     def build_callbacks(self):
        ...         return {"print_epochs": PrintEpochs()}
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run first, before data loaders and checkpoints are loaded.

        Args:
            first_batch_idx: Batches completed before this run.
            checkpoint_uuid: Checkpoint to resume from; None at the first start.
        """

    def on_trial_shutdown(self) -> None:
        """Run last, also after an error."""

    def on_training_start(self) -> None:
        """Run before the first batch of this run.

        A checkpoint to resume from has been loaded.
        """

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch.

        Args:
            epoch_idx: Index of the epoch, from 0.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch.

        Args:
            epoch_idx: Index of the epoch, from 0.
        """

    def on_training_workload_end(
        self, avg_metrics: dict[str, float], batch_metrics: list[dict[str, float]]
    ) -> None:
        """Run after each reporting period, before its metrics are reported.

        Args:
            avg_metrics: Metrics averaged over the period's batches and all ranks.
            batch_metrics: Metrics of each batch, averaged over the ranks.
        """

    def on_validation_start(self) -> None:
        """Run before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Run before the pass over the validation data."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the pass over the validation data.

        Args:
            outputs: Results of ``evaluate_batch`` on this rank, one per micro-batch.
        """

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """Run after a validation, with its reduced metrics.

        Args:
            metrics: Reduced metrics, the same on every rank.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before this rank's state is restored.

        Args:
            checkpoint: Copy of the checkpoint's counters, such as ``steps_completed``.
        """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written.

        Args:
            checkpoint: Copy of the loop's counters, such as ``steps_completed``. Use
                :meth:`state_dict` to store more.
        """

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run after the files of a checkpoint are written, before its publication.

        Args:
            checkpoint_dir: Directory of the files; files that you add belong to the checkpoint.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run after a checkpoint is complete in the storage.

        Args:
            uuid: The checkpoint.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint.

        Returns:
            Tensors, numbers, strings, and lists and dicts of them. Empty by default.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Args:
            state_dict: Saved state of the callback with the same name.
        """


class CallbackList:
    """Callbacks of a trial, in the order of ``build_callbacks``."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        if not isinstance(callbacks, Mapping):
            raise TrialError(
                "build_callbacks: must return a dict of names to zerotrial.Callback objects, got "
                f"{type(callbacks).__name__}"
            )
        self.by_name = dict(callbacks)
        for name, callback in self.by_name.items():
            if not isinstance(callback, Callback):
                raise TrialError(
                    f"build_callbacks: {name}: must be a zerotrial.Callback object, "
                    f"got {callback!r}"
                )
            _warn_of_unknown_methods(name, type(callback))

    def __len__(self) -> int:
        return len(self.by_name)

    def call(self, method: str, *arguments: Any) -> None:
        """Call one method of every callback."""
        for callback in self.by_name.values():
            getattr(callback, method)(*arguments)

    def overrides(self, method: str) -> bool:
        """Return whether any callback overrides a method."""
        base = getattr(Callback, method)
        callbacks = self.by_name.values()
        return any(getattr(type(callback), method, base) is not base for callback in callbacks)


def _warn_of_unknown_methods(name: str, callback_class: type) -> None:
    """Warn of methods with a callback's name that the loop never calls."""
    replaced = replacements("Callback.")
    methods = [name for name in dir(Callback) if name.startswith("on_")]
    for method in dir(callback_class):
        if method in replaced:
            logger.warning("callback %r: %s is never called; %s", name, method, replaced[method])
        elif method.startswith("on_") and method not in methods:
            suggestion = suggest(method, methods)
            logger.warning(
                "callback %r: %s is never called by the loop%s", name, method, suggestion
            )
