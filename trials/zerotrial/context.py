"""Context of a trial: hyperparameters, engines, ranks, position and metrics."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerolab.contract.hparam_reads import as_trial_hparams, tracked
from zerolab.contract.names import metric_name_problem
from zerolab.contract.spec import RunSpec
from zerolab.errors import TrialError
from zerolab.registry import Registry
from zerolab.replacements import NamesReplacements
from zerolab.schema.section import suggest
from zerotrial.data.devices import choose_device, to_device
from zerotrial.engine_view import EngineView, ModelParallelUnit, make_data_parallel_mpu, view_of
from zerotrial.ranks import Distributed
from zerotrial.reducers import MetricReducers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from zerotrial.loop.run_directories import RunDirectories

__all__ = ["ZeroTrialContext"]

logger = logging.getLogger(__name__)

TRIAL_PARTS: Registry[Any] = Registry("zerotrial.trial_parts", {})
"""Extensions that the context calls: ``metric_reducers`` has custom reducers."""


class ZeroTrialContext(NamesReplacements):
    """Interface of a trial's code to the platform.

    The harness or :func:`zerotrial.init` makes it. A trial gets it in ``__init__``.

    Args:
        spec: Specification of the run that this process belongs to.
        distributed: Ranks of the run.
    """

    def __init__(self, spec: RunSpec, distributed: Distributed) -> None:
        self.spec = spec
        self._hparams: dict[str, Any] = tracked(spec.hparams)
        self.distributed = distributed
        self.device = choose_device(distributed.local_rank)
        self.engines: list[EngineView] = []
        """Views of the wrapped engines, in the order of wrapping."""
        self.warm_start = False
        """Whether the checkpoint being loaded belongs to another trial."""
        self.profiler: torch.profiler.profile | None = None
        self.auto_grad_accumulation = True
        self.dataset_checks = True
        self.reducers = MetricReducers()
        self._mpu = make_data_parallel_mpu(distributed)
        self._mpu_is_set = False
        self._stop_requested = False
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_logging = True
        self.run_directories: RunDirectories | None = None
        """Run directories of a script outside an experiment."""
        self._batch: int | None = None  # set by the controller
        self._epoch_length: int | None = None

    # Engines and their batch sizes

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine of :func:`zerotrial.initialize` (or ``deepspeed.initialize``).

        The first engine defines the batch size of the trial. All engines are checkpointed.

        Args:
            model: The engine.

        Returns:
            The engine.

        Raises:
            TrialError: If it is not an engine, or is wrapped already.
        """
        view = view_of(model)
        if any(model is engine for engine in self.models):
            raise TrialError("wrap_model_engine: this engine is wrapped already")
        if self.engines and view.micro_batch_size != self._first_engine.micro_batch_size:
            logger.warning(
                "the micro-batch sizes of the engines differ (%d, then %d): samples are counted "
                "for the first engine only",
                self._first_engine.micro_batch_size,
                view.micro_batch_size,
            )
        self.engines.append(view)
        if len(self.engines) == 1:
            self._mpu = view.make_mpu() or self._mpu
        elif view.is_pipeline:
            logger.warning("only the first engine decides how data is sharded; this is another")
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Set the model-parallel unit of this rank, if the engine cannot know it.

        Raises:
            TrialError: If no engine is wrapped, or on a second call.
        """
        if not self.engines:
            raise TrialError("set_mpu: wrap an engine first (context.wrap_model_engine)")
        if self._mpu_is_set:
            raise TrialError(
                "set_mpu: the model-parallel unit is set already; all engines share it"
            )
        self._mpu, self._mpu_is_set = mpu, True

    @property
    def mpu(self) -> ModelParallelUnit:
        """Model-parallel unit of this rank."""
        return self._mpu

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether the first engine is a pipeline, which trains a full batch in one call."""
        return bool(self.engines) and self._first_engine.is_pipeline

    @property
    def models(self) -> list[Any]:
        """Wrapped engines, in the order of wrapping."""
        return [view.engine for view in self.engines]

    def set_default_data(self, batches: Iterator[Any] | None) -> None:
        """Set the iterator that the engines' ``train_batch()`` and ``eval_batch()`` default to.

        Args:
            batches: Iterator over the current loader.
        """
        for model in self.models:
            if hasattr(type(model), "default_data"):
                model.default_data = batches

    def disable_auto_grad_accumulation(self) -> None:
        """Call ``train_batch`` once per batch; it must then train all micro-batches itself."""
        self.auto_grad_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any data loader; the trial is then responsible for sharding and seeding."""
        self.dataset_checks = False

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples in one forward pass on one rank.

        Raises:
            TrialError: If no engine is wrapped.
        """
        return self._first_engine.micro_batch_size

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the micro-batches in one batch on one rank (gradient accumulation steps).

        Raises:
            TrialError: If no engine is wrapped.
        """
        return self._first_engine.accumulation_steps

    def get_per_slot_batch_size(self) -> int:
        """Return the samples in one batch on one rank.

        Raises:
            TrialError: If no engine is wrapped.
        """
        return self._first_engine.micro_batch_size * self._first_engine.accumulation_steps

    def get_global_batch_size(self) -> int:
        """Return the samples in one batch, over all ranks.

        Raises:
            TrialError: If no engine is wrapped.
        """
        return self.get_per_slot_batch_size() * self._mpu.data_parallel_world_size

    @property
    def train_micro_batch_size_per_gpu(self) -> int:
        """Determined's older name of :meth:`get_train_micro_batch_size_per_gpu`."""
        return self.get_train_micro_batch_size_per_gpu()

    @property
    def num_micro_batches_per_slot(self) -> int:
        """Determined's older name of :meth:`get_num_micro_batches_per_slot`."""
        return self.get_num_micro_batches_per_slot()

    @property
    def _first_engine(self) -> EngineView:
        if not self.engines:
            raise TrialError(
                "no engine is wrapped yet: pass what zerotrial.initialize returns to "
                "context.wrap_model_engine in __init__"
            )
        return self.engines[0]

    # Configuration and identity

    def get_hparams(self) -> dict[str, Any]:
        """Return this trial's hyperparameters, nested as in the experiment file."""
        hparams: dict[str, Any] = as_trial_hparams(self._hparams)
        return hparams

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter.

        Args:
            name: Name of a hyperparameter, or of a group of them.

        Raises:
            TrialError: If the name is unknown.
        """
        try:
            return as_trial_hparams(self._hparams[name])
        except KeyError:
            names = sorted(self.spec.hparams)
            listing = ", ".join(names) or "none"
            hint = suggest(str(name), names)
            raise TrialError(
                f"unknown hyperparameter {name!r}; there are: {listing}{hint}"
            ) from None

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment's configuration; outside the platform, what ``init`` got."""
        return self.spec.config

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of the experiment's configuration."""
        return self.spec.data

    def get_experiment_id(self) -> int:
        """Return the experiment's number; 0 outside the platform."""
        return self.spec.experiment_id

    def get_trial_id(self) -> int:
        """Return the trial's number; 0 outside the platform."""
        return self.spec.trial_id

    def get_trial_seed(self) -> int:
        """Return the seed of all random number generators of this trial."""
        return self.spec.trial_seed

    def get_initial_batch(self) -> int:
        """Return the batches completed before this run."""
        ref = self.spec.latest_checkpoint
        return ref.steps_completed if ref is not None else 0

    # Data

    def to_device(self, data: Any) -> Any:
        """Move a micro-batch, nested in any way, to this rank's device."""
        return to_device(data, self.device)

    # Position in training

    def current_train_batch(self) -> int:
        """Return the batches completed since the trial began.

        Raises:
            TrialError: If training has not begun.
        """
        if self._batch is None:
            raise TrialError("training has not begun")
        return self._batch

    def current_train_epoch(self) -> int:
        """Return the epochs completed since the trial began.

        Raises:
            TrialError: If training has not begun, or the data has no length.
        """
        return self.current_train_batch() // self._batches_per_epoch

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first one of an epoch.

        Raises:
            TrialError: If training has not begun, or the data has no length.
        """
        return self.current_train_batch() % self._batches_per_epoch == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last one of an epoch.

        Raises:
            TrialError: If training has not begun, or the data has no length.
        """
        return (self.current_train_batch() + 1) % self._batches_per_epoch == 0

    @property
    def _batches_per_epoch(self) -> int:
        if not self._epoch_length:
            raise TrialError("the training data has no length, so there are no epochs")
        return self._epoch_length

    def set_stop_requested(self, stop_requested: bool) -> None:  # noqa: FBT001 - its only argument
        """Request to save a checkpoint and end the trial soon; one rank is enough."""
        self._stop_requested = bool(stop_requested)

    def get_stop_requested(self) -> bool:
        """Return whether this rank has requested to end the trial."""
        return self._stop_requested

    # Metrics, profiles, TensorBoard

    def wrap_reducer(
        self,
        reducer: Any,
        name: str | None = None,
        for_training: bool = True,  # noqa: FBT001, FBT002 - Determined's signature
        for_validation: bool = True,  # noqa: FBT001, FBT002 - as above
    ) -> Any:
        """Register a metric that is computed from all values of all ranks.

        Args:
            reducer: A :class:`zerotrial.MetricReducer`, or a function of the flat list of values.
            name: Name of the metric; None if the reducer returns a dict of metrics.
            for_training: Reduce and reset it with training metrics.
            for_validation: Reduce and reset it with validation metrics.

        Returns:
            The reducer; for a function, an object with ``update(value)``.

        Raises:
            TrialError: If it is wrapped already, or neither a reducer nor callable.

        Example::

            self.median = context.wrap_reducer(statistics.median, name="median_loss")
            ...
            self.median.update(loss.item())  # in train_batch or evaluate_batch
        """
        if type(self.reducers) is MetricReducers:
            self.reducers = TRIAL_PARTS["metric_reducers"]()
        reducers: Any = self.reducers
        return reducers.wrap(
            reducer, name, for_training=for_training, for_validation=for_validation
        )

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(...)``, one profiler step per batch.

        Traces go to ``traces/`` in the run's directory.

        Args:
            args: Positional arguments of ``torch.profiler.profile``.
            kwargs: Keyword arguments of ``torch.profiler.profile``.
        """
        directory = Path(self.spec.run_dir) / "traces"
        handler = torch.profiler.tensorboard_trace_handler(
            str(directory), worker_name=f"rank_{self.distributed.rank}"
        )
        kwargs.setdefault("on_trace_ready", handler)
        self.profiler = torch.profiler.profile(*args, **kwargs)

    def get_tensorboard_path(self) -> Path:
        """Return the directory of this run's TensorBoard files."""
        return Path(self.spec.run_dir) / "tensorboard"

    def get_tensorboard_writer(self) -> "SummaryWriter":
        """Return a writer to :meth:`get_tensorboard_path`; it also gets all reported metrics."""
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            suffix = "" if self.distributed.is_chief else f".rank_{self.distributed.rank}"
            self._tensorboard = SummaryWriter(
                str(self.get_tensorboard_path()), filename_suffix=suffix
            )
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:  # noqa: FBT001
        """Set whether the trial's TensorBoard writer gets reported metrics."""
        self._tensorboard_logging = bool(enable_tensorboard_logging)

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether the trial's TensorBoard writer gets reported metrics."""
        return self._tensorboard_logging

    # For the controller

    def use_run(self, spec: RunSpec) -> None:
        """Switch to another run: its directory, and its checkpoint to resume from."""
        previous = self.get_tensorboard_path()
        self.spec = spec
        current = self.get_tensorboard_path()
        if self._tensorboard is None or previous == current:
            return
        self._tensorboard.close()
        current.mkdir(parents=True, exist_ok=True)
        if not any(previous.parent.glob("*.jsonl")):  # no run has reported there: move the files
            for file in previous.iterdir():
                file.rename(current / file.name)
        self._tensorboard.log_dir = str(current)  # its next call opens a file there

    def begin_training(self, epoch_length: int | None) -> None:
        """Set the length of an epoch, in batches."""
        self._epoch_length = epoch_length

    def enter_batch(self, batch: int) -> None:
        """Set the current batch, counted from 0."""
        self._batch = batch

    def log_to_tensorboard(self, prefix: str, steps: int, metrics: dict[str, Any]) -> None:
        """Write reported metrics if the trial has a TensorBoard writer."""
        if self._tensorboard is not None and self._tensorboard_logging:
            for name, value in metrics.items():
                if metric_name_problem(str(name)):  # the reporter has warned
                    continue
                self._tensorboard.add_scalar(f"{prefix}/{name}", value, steps)
            self._tensorboard.flush()

    def close(self) -> None:
        """Close the TensorBoard writer."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
