"""Lightning's Trainer in a trial: metrics, checkpoints, preemption and resume.

``ZerolabLogger`` records what ``self.log`` is given. ``ZerolabCallback`` stores a checkpoint after
each epoch and on preemption, and has the path to resume from.
"""

import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

import zerolab.core
from zerolab.core.context import Context
from zerotrial.extensions.huggingface.run import join, leave, put_back, store

__all__ = ["ZerolabCallback", "ZerolabLogger"]

_VALIDATION = ("eval", "val", "test")
"""Names that begin so are of a validation; so is the searcher's metric, whatever its name."""
_FILE = "trainer.ckpt"


class ZerolabLogger(Logger):  # type: ignore[misc]  # Lightning is optional
    """Records metrics of ``self.log`` in the trial. **Collective**: every rank makes one.

    Metrics whose names begin with ``val``, ``eval`` or ``test``, and the searcher's own, are
    validation metrics. Steps count optimizer steps.

    Args:
        hparams: Hyperparameters of a run without a server; a trial has its own.

    Example::

        logger = ZerolabLogger()
        trainer = lightning.Trainer(logger=logger, callbacks=[ZerolabCallback()])
    """

    def __init__(self, hparams: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if zerolab.core.current() is None:
            zerolab.core.init(hparams=hparams)
        self._context = join()

    @property
    def experiment(self) -> Context:
        """Context of the Core API of this run."""
        return self._context

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return str(self._context.info.config.get("name", ""))

    @property
    def version(self) -> str:
        """Number of the trial."""
        return f"trial_{self._context.info.trial_id}"

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: dict[str, Any] | Namespace, **unused: Any) -> None:
        """Do nothing: the trial has its hyperparameters.

        Args:
            params: Ignored.
            **unused: Arguments of other loggers.
        """

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: Values by name; Lightning adds ``epoch``.
            step: Index of the last optimizer step, from 0.
        """
        train, fit = self._context.train, self._context.info.fit
        completed = 0 if step is None else step + 1
        searched = fit.metric if fit is not None else None
        values = {name: value for name, value in metrics.items() if name != "epoch"}
        validation = {
            name: value
            for name, value in values.items()
            if name == searched or name.lower().startswith(_VALIDATION)
        }
        training = {name: value for name, value in values.items() if name not in validation}
        if training:
            train.report_training_metrics(completed, training)
        if validation:
            if "epoch" in metrics:
                validation["epochs"] = metrics["epoch"] + 1  # compared with the searcher's length
            train.report_validation_metrics(completed, validation)


class ZerolabCallback(Callback):  # type: ignore[misc]  # Lightning is optional
    """Stores a checkpoint after each epoch, and before the process ends by preemption.

    A process ends when the server needs its slots, pauses or stops the trial, or when the trial has
    reached the length that its searcher requested. **Collective**: every rank makes one.

    Example::

        callback = ZerolabCallback()
        trainer = lightning.Trainer(callbacks=[callback])
        trainer.fit(model, ckpt_path=callback.latest_checkpoint())
    """

    def __init__(self) -> None:
        self._context = join()
        self._folder = Path(self._context.info.run_dir) / "lightning"
        self._stored = -1  # optimizer steps at the newest checkpoint
        self._is_preempted = False

    def latest_checkpoint(self) -> str | None:
        """Return ``ckpt_path`` for ``Trainer.fit``. **Collective**.

        Returns:
            Path of the checkpoint to resume from; None at the first start, and for a warm start,
            whose weights the script loads.
        """
        latest = self._context.train.latest_checkpoint
        if latest is None or latest.warm_start:
            return None
        folder = self._folder.with_name("lightning_resume")
        put_back(self._context, latest.uuid, folder)
        return str(folder / _FILE)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any
    ) -> None:
        """End the process after a preemption, once the metrics of its batch are recorded."""
        del trainer, pl_module, batch
        if self._is_preempted:
            leave(self._context)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Store a checkpoint if the run is preempted. **Collective**."""
        del pl_module, batch
        self._is_preempted = self._context.preempt.should_preempt()
        if self._is_preempted and not trainer.is_last_batch:  # else after the validation
            self._store(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store a checkpoint; end the process at the searcher's length. **Collective**."""
        del pl_module
        self._store(trainer)
        has_reached = self._context.distributed.broadcast(self._context.train.has_reached)
        if has_reached or self._is_preempted:
            leave(self._context)

    def _store(self, trainer: Trainer) -> None:
        if trainer.global_step == self._stored:
            return
        self._folder.mkdir(parents=True, exist_ok=True)  # on machines without rank 0, too
        trainer.save_checkpoint(self._folder / _FILE, weights_only=False)
        self._stored = trainer.global_step
        store(self._context, self._folder, {"steps_completed": trainer.global_step})
        if self._context.distributed.local_rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
