"""Base class of users' trials, and checks of a trial class before it is built."""

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerolab.errors import InvalidHyperparametersError, TrialError
from zerolab.schema.section import closest
from zerotrial.callbacks import Callback
from zerotrial.data.loader import data_length
from zerotrial.reducers import Reducer

if TYPE_CHECKING:
    from zerotrial.context import ZeroTrialContext

__all__ = ["InvalidHP", "ZeroTrial", "check_trial_class"]

InvalidHP = InvalidHyperparametersError
"""Raise it anywhere in a trial to end it early: its hyperparameters are an invalid combination."""


class ZeroTrial(ABC):
    """Base class of trials: model, data, and one training step.

    In ``__init__`` build the model, pass it to :func:`zerotrial.initialize`, and pass the resulting
    engine to ``context.wrap_model_engine``. The controller trains, validates, checkpoints, reports
    and resumes. Every method runs on every rank unless its documentation states otherwise.

    Args:
        context: Hyperparameters, devices and ranks; store it as ``self.context``.

    Example:
        >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        >>> class MyTrial(zerotrial.ZeroTrial):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         model = torch.nn.Linear(4, 1)
        ...         engine, *_ = zerotrial.initialize(model=model, config=config)
        ...         self.engine = context.wrap_model_engine(engine)
        ...     def build_training_data_loader(self):
        ...         inputs = torch.randn(64, 4)
        ...         data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        ...         return zerotrial.DataLoader(data, batch_size=8, shuffle=True)
        ...     build_validation_data_loader = build_training_data_loader
        ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        ...         x, y = self.context.to_device(next(dataloader_iter))
        ...         loss = torch.nn.functional.mse_loss(self.engine(x), y)
        ...         self.engine.backward(loss)
        ...         self.engine.step()
        ...         return loss
        ...     def evaluate_batch(self, dataloader_iter):
        ...         x, y = self.context.to_device(next(dataloader_iter))
        ...         return {"loss": torch.nn.functional.mse_loss(self.engine(x), y)}
        >>> with zerotrial.init() as context:
        ...     result = zerotrial.Trainer(MyTrial(context), context).fit(max_length=16)
    """

    @abstractmethod
    def __init__(self, context: "ZeroTrialContext") -> None: ...

    @abstractmethod
    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train on one micro-batch: ``next(dataloader_iter)``, forward, backward, step.

        The loop calls it ``gradient_accumulation_steps`` times for each batch. It calls it once for
        a pipeline engine, or after ``context.disable_auto_grad_accumulation()``.

        Args:
            dataloader_iter: An endless iterator; ``None`` on ranks that read no data.
            epoch_idx: Epochs completed.
            batch_idx: Batches completed since the trial began, across restarts.

        Returns:
            The loss as a scalar tensor (reported as ``loss``), or a dict of metrics: names to
            scalar tensors or numbers.
        """

    def evaluate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one micro-batch and return its metrics.

        Override it as ``evaluate_batch(self, dataloader_iter, batch_idx)``, or without the index.
        Gradients are disabled. The loop calls it once for each micro-batch of the validation
        loader.

        Args:
            args: The iterator, and the index of the call in this validation.
            kwargs: Unused.

        Returns:
            A dict of metrics, names to scalar tensors or numbers, which :meth:`evaluation_reducer`
            reduces.

        Raises:
            TrialError: If neither this nor :meth:`evaluate_full_dataset` is overridden.
        """
        raise TrialError(
            f"{type(self).__name__}: must override evaluate_batch (or evaluate_full_dataset)"
        )

    @abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return the data loader of the training data.

        The loop calls it on the ranks that read data: all ranks, except middle pipeline stages.

        Returns:
            A :class:`zerotrial.DataLoader` of micro-batches. Another loader is accepted after
            ``context.disable_dataset_reproducibility_checks()``.
        """

    @abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return the data loader of the validation data.

        The loop calls it on the ranks that read data: all ranks, except middle pipeline stages.

        Returns:
            A :class:`zerotrial.DataLoader` of micro-batches.
        """

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Evaluate the whole data set in one call, replacing :meth:`evaluate_batch`.

        The loop calls it on the chief. If the engine's forward pass is collective, the loop calls
        it on every rank and reports the chief's metrics. All ranks must then draw the same number
        of batches. A stop request interrupts the iteration of the loader.

        Args:
            data_loader: The unsharded validation loader; it stops at its length.

        Returns:
            A dict of metrics: names to scalar tensors or numbers.

        Raises:
            TrialError: If it is not overridden.
        """
        raise TrialError(f"{type(self).__name__}: evaluate_full_dataset is not overridden")

    def evaluation_reducer(
        self,
    ) -> Reducer | Callable[[list[float]], float] | dict[str, Any]:
        """Return how validation metrics are reduced over batches and ranks.

        Returns:
            A :class:`zerotrial.Reducer` or a function of the list of values, for all metrics; or a
            dict with one of them per metric. By default ``Reducer.AVG``.
        """
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, Callback]:
        """Return the callbacks of this trial by name.

        Returns:
            Callbacks by name; the name is the key of their state in checkpoints. Empty by default.
        """
        return {}

    def save(self, context: "ZeroTrialContext", path: Path) -> None:
        """Write the engines of the trial below a path. **Collective**.

        Override it together with :meth:`load` to store more than engines and callbacks.

        Args:
            context: Context of the trial.
            path: Existing directory of the checkpoint; every rank writes its own files.
        """
        for index, engine in enumerate(context.engines):
            engine.save(str(path), f"model{index}")

    def load(self, context: "ZeroTrialContext", path: Path) -> None:
        """Load the engines from the files of :meth:`save`. **Collective**.

        A warm start from another trial's checkpoint loads only the weights. Optimizer and schedule
        stay as this trial's hyperparameters define them.

        Args:
            context: Context of the trial.
            path: Directory of the checkpoint.

        Raises:
            TrialError: If the checkpoint lacks an engine's files.
        """
        for index, engine in enumerate(context.engines):
            if not engine.load(str(path), f"model{index}", module_only=context.warm_start):
                raise TrialError(f"{path}: has no checkpoint of engine model{index}")

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of samples in a micro-batch.

        Args:
            batch: A micro-batch of the data loader.

        Returns:
            Length of its first tensor or array, by default.

        Raises:
            TypeError: If it has neither a tensor nor an array; override the method then.
        """
        return data_length(batch)


logger = logging.getLogger(__name__)

_PARAMETERS = {
    "__init__": ("context",),
    "train_batch": ("dataloader_iter", "epoch_idx", "batch_idx"),
    "evaluate_batch": ("dataloader_iter",),
    "evaluate_full_dataset": ("data_loader",),
    "build_training_data_loader": (),
    "build_validation_data_loader": (),
    "build_callbacks": (),
    "evaluation_reducer": (),
    "get_batch_length": ("batch",),
    "save": ("context", "path"),
    "load": ("context", "path"),
}
"""Arguments that the loop passes to each method, by position."""

_OPTIONAL = (
    "build_callbacks", "evaluation_reducer", "evaluate_batch", "evaluate_full_dataset",
    "get_batch_length",
)  # fmt: skip


def check_trial_class(trial_class: type[ZeroTrial], *, is_built: bool = False) -> None:
    """Check the methods of a trial class; warn about names that look misspelled.

    Args:
        trial_class: The class.
        is_built: Whether the trial exists: its ``__init__`` may then have other parameters.

    Raises:
        TrialError: If it lacks a method, or declares one that the loop cannot call.
    """
    name = trial_class.__name__
    abstract: frozenset[str] = getattr(trial_class, "__abstractmethods__", frozenset())
    missing = sorted(abstract)
    if not {"evaluate_batch", "evaluate_full_dataset"} & _overridden(trial_class):
        missing.append("evaluate_batch")
    problems = [f"{name}: must define {method}{_rename(trial_class, method)}" for method in missing]
    problems += [
        f"{name}.{method}: must be {method}({', '.join(('self', *parameters))}), got {declared}"
        for method, parameters in _PARAMETERS.items()
        if not (is_built and method == "__init__")
        and (declared := _wrong_signature(trial_class, method, len(parameters)))
    ]
    if problems:
        raise TrialError("\n".join(problems))
    for method in sorted(_own_methods(trial_class)):
        suggestion = closest(method, _OPTIONAL, cutoff=0.85)
        if suggestion is not None and suggestion not in _overridden(trial_class):
            logger.warning("%s.%s is never called; did you mean %r?", name, method, suggestion)


def _overridden(trial_class: type[ZeroTrial]) -> set[str]:
    return {
        method
        for method in _PARAMETERS
        if getattr(trial_class, method) is not getattr(ZeroTrial, method)
    }


def _own_methods(trial_class: type[ZeroTrial]) -> set[str]:
    """Return the public methods that the base class does not have."""
    names = set(dir(trial_class)) - set(dir(ZeroTrial))
    return {
        name
        for name in names
        if not name.startswith("_") and callable(inspect.getattr_static(trial_class, name))
    }


def _rename(trial_class: type[ZeroTrial], method: str) -> str:
    close = closest(method, _own_methods(trial_class), cutoff=0.75)
    return f"; rename {close!r} to {method!r}" if close else ""


def _wrong_signature(trial_class: type[ZeroTrial], method: str, arguments: int) -> str:
    """Return the declaration of a method that takes fewer arguments; "" if it can."""
    declared = inspect.getattr_static(trial_class, method)
    if not inspect.isfunction(declared):  # a static method, a wrapper: they know what they do
        return ""
    try:
        signature = inspect.signature(declared)
    except (TypeError, ValueError):
        return ""
    for count in (arguments, arguments + 1) if method == "evaluate_batch" else (arguments,):
        try:
            signature.bind(*[None] * (1 + count))
        except TypeError:
            continue
        return ""
    parameters = ", ".join(map(str, signature.parameters.values()))
    return f"{method}({parameters})"
