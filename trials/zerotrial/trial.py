"""The class that a user writes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.errors import InvalidHyperparametersError, TrialError
from zerotrial.callbacks import Callback
from zerotrial.data.loader import data_length
from zerotrial.reducers import Reducer

if TYPE_CHECKING:
    from zerotrial.context import ZeroTrialContext

__all__ = ["InvalidHP", "ZeroTrial"]

InvalidHP = InvalidHyperparametersError
"""Raise it anywhere in a trial to end it early: its hyperparameters make no sense together."""


class ZeroTrial(ABC):
    """A model, its data, and what to do with one micro-batch.

    In ``__init__`` build the model, give it to :func:`zerotrial.initialize`, and the engine that
    comes back to ``context.wrap_model_engine``. The controller does the rest: it trains,
    validates, checkpoints, reports and resumes.

    Args:
        context: Hyperparameters, devices, ranks; keep it as ``self.context``.
    """

    @abstractmethod
    def __init__(self, context: "ZeroTrialContext") -> None: ...

    @abstractmethod
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train on one micro-batch: ``next(dataloader_iter)``, forward, backward, step.

        Called ``gradient_accumulation_steps`` times for each batch; once for a pipeline engine, or
        after ``context.disable_auto_grad_accumulation()``.

        Args:
            dataloader_iter: An endless iterator; ``None`` on ranks that read no data.
            epoch_idx: Epochs completed.
            batch_idx: Batches completed since the trial began, restarts included.

        Returns:
            The loss as a tensor (reported as ``loss``), or a dict of metrics.
        """

    def evaluate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch.

        Override it as ``evaluate_batch(self, dataloader_iter, batch_idx)``, or without the index.

        Args:
            args: The iterator, and the index of the call in this validation.
            kwargs: None.

        Returns:
            A dict of metrics; they are reduced as :meth:`evaluation_reducer` says.

        Raises:
            TrialError: If neither this nor :meth:`evaluate_full_dataset` is overridden.
        """
        raise TrialError(
            f"{type(self).__name__}: must override evaluate_batch (or evaluate_full_dataset)"
        )

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """A :class:`zerotrial.DataLoader` that yields micro-batches, or ``None``."""

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """A :class:`zerotrial.DataLoader` that yields micro-batches, or ``None``."""

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Evaluate everything at once, in place of :meth:`evaluate_batch`.

        Called with the whole validation loader, on the chief; on every rank where the engine's
        forward pass needs all ranks, and then the chief's result counts, and all ranks draw as many
        batches. The loader ends where its length says, and when the trial is told to leave.

        Raises:
            TrialError: If it is called without being overridden.
        """
        raise TrialError(f"{type(self).__name__}: evaluate_full_dataset is not overridden")

    def evaluation_reducer(
        self,
    ) -> Reducer | Callable[[list[float]], float] | dict[str, Any]:
        """How validation metrics are reduced: one way for all, or one for each metric's name."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, Callback]:
        """Callbacks by name; the name is the key of their state in checkpoints."""
        return {}

    def save(self, context: "ZeroTrialContext", path: Path) -> None:
        """Write the engines below ``path``; every rank calls it. **Collective**."""
        for index, engine in enumerate(context.models):
            engine.save_checkpoint(str(path), tag=f"model{index}")

    def load(self, context: "ZeroTrialContext", path: Path) -> None:
        """Read what :meth:`save` wrote; every rank calls it. **Collective**.

        A warm start from another trial's checkpoint takes the weights and leaves optimizer and
        schedule as this trial's hyperparameters made them.

        Raises:
            TrialError: If an engine finds nothing to load.
        """
        options = {"load_module_only": True} if context.warm_start else {}
        for index, engine in enumerate(context.models):
            loaded, _ = engine.load_checkpoint(str(path), tag=f"model{index}", **options)
            if loaded is None:
                raise TrialError(f"{path}: holds no checkpoint of engine model{index}")

    def get_batch_length(self, batch: Any) -> int:
        """Samples in a micro-batch; override it where the first tensor's length is not it."""
        return data_length(batch)
