"""Hooks into the moments of a trial."""

import logging
from collections.abc import Mapping
from typing import Any

from zerolab.schema.section import suggest

__all__ = ["Callback", "CallbackList"]

logger = logging.getLogger(__name__)

_OLDER = {"on_checkpoint_end": "on_checkpoint_write_end", "trial_cleanup": "on_trial_shutdown"}
"""Methods of Determined's callbacks that are others here."""


class Callback:
    """Override what you need; every method runs on every rank and does nothing by default.

    Return instances from ``ZeroTrial.build_callbacks``; what ``state_dict`` returns is kept in
    each checkpoint, under the name given there.
    """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Before anything else: how many batches are done, and the checkpoint they come from."""

    def on_trial_shutdown(self) -> None:
        """After everything else, an error included."""

    def on_training_start(self) -> None:
        """Before the first batch of this run, after a checkpoint has been loaded."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch."""

    def on_training_workload_end(
        self, avg_metrics: dict[str, float], batch_metrics: list[dict[str, float]]
    ) -> None:
        """After training metrics were averaged over the ranks, and before they are reported."""

    def on_validation_start(self) -> None:
        """Before a validation."""

    def on_validation_epoch_start(self) -> None:
        """Before the pass over the validation data."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """After the pass; ``outputs`` is what ``evaluate_batch`` returned on this rank."""

    def on_validation_end(self, metrics: dict[str, float]) -> None:
        """After a validation, with its reduced metrics."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Before this rank's saved state is put back; ``checkpoint`` holds its counters."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written; ``checkpoint`` holds its counters."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """After all files of a checkpoint are written, and before it is published."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """After a checkpoint is complete in the storage."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep in a checkpoint: tensors, numbers, strings, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""


class CallbackList:
    """All callbacks of a trial, called in the order of ``build_callbacks``."""

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self.by_name = dict(callbacks)
        for name, callback in self.by_name.items():
            _warn_of_strangers(name, type(callback))

    def __len__(self) -> int:
        return len(self.by_name)

    def call(self, moment: str, *arguments: Any) -> None:
        """Call one method of every callback."""
        for callback in self.by_name.values():
            getattr(callback, moment)(*arguments)

    def overrides(self, moment: str) -> bool:
        """Whether any callback has its own version of a method."""
        base = getattr(Callback, moment)
        return any(getattr(type(one), moment, base) is not base for one in self.by_name.values())


def _warn_of_strangers(name: str, kind: type) -> None:
    """Say which methods look as if they were called, and never are."""
    moments = [known for known in dir(Callback) if known.startswith("on_")]
    for method in dir(kind):
        if method in _OLDER:
            logger.warning(
                "callback %r: %s is never called; define %s", name, method, _OLDER[method]
            )
        elif method.startswith("on_") and method not in moments:
            close = suggest(method, moments)
            logger.warning("callback %r: %s is never called by the loop%s", name, method, close)
