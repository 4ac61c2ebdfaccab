"""What a trial's code asks and tells the platform."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerolab.contract.hparam_reads import hand_out, tracked
from zerolab.contract.names import metric_name_problem
from zerolab.contract.spec import RunSpec
from zerolab.determined.names import TRIAL_CONTEXT, missing
from zerolab.errors import TrialError
from zerolab.schema.section import suggest
from zerotrial.compat.engine_view import EngineView, view_of
from zerotrial.data.devices import choose_device, to_device
from zerotrial.mpu import ModelParallelUnit, make_data_parallel_mpu
from zerotrial.ranks import Distributed
from zerotrial.reducers import ReducerSet

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from zerotrial.loop.run_directories import RunDirectories

__all__ = ["ZeroTrialContext"]

logger = logging.getLogger(__name__)


class ZeroTrialContext:
    """Given to a trial's ``__init__``; made by the harness or by :func:`zerotrial.init`.

    Args:
        spec: The run that this process belongs to.
        distributed: Its ranks.
    """

    def __init__(self, spec: RunSpec, distributed: Distributed) -> None:
        self.spec = spec
        self._hparams: dict[str, Any] = tracked(spec.hparams)
        self.distributed = distributed
        self.device = choose_device(distributed.local_rank)
        self.engines: list[EngineView] = []
        """As the controller sees them, in the order in which they were wrapped."""
        self.warm_start = False
        """Whether the checkpoint being loaded belongs to another trial."""
        self.profiler: torch.profiler.profile | None = None
        self.auto_grad_accumulation = True
        self.dataset_checks = True
        self.reducers = ReducerSet()
        self._mpu = make_data_parallel_mpu(distributed)
        self._mpu_is_set = False
        self._stop_requested = False
        self._tensorboard: SummaryWriter | None = None
        self._tensorboard_logging = True
        self.run_directories: RunDirectories | None = None
        """Those of the script's runs, outside an experiment."""
        self._batch: int | None = None  # the loop's place; set by the controller
        self._epoch_length: int | None = None

    # Engines and their batch sizes

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine of :func:`zerotrial.initialize` (or ``deepspeed.initialize``).

        The first one fixes the batch size of the trial. All engines are checkpointed.

        Returns:
            The engine.

        Raises:
            TrialError: If it is no engine, or already wrapped.
        """
        view = view_of(model)
        if any(model is known for known in self.models):
            raise TrialError("wrap_model_engine: this engine is wrapped already")
        if self.engines and view.micro_batch_size != self._first.micro_batch_size:
            logger.warning(
                "the micro-batch sizes of the engines differ (%d, then %d): samples are counted "
                "for the first engine alone",
                self._first.micro_batch_size,
                view.micro_batch_size,
            )
        self.engines.append(view)
        if len(self.engines) == 1:
            self._mpu = view.make_mpu() or self._mpu
        elif view.is_pipeline:
            logger.warning("only the first engine decides how data is dealt out; this is another")
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Say which replica this rank belongs to, where the engine cannot know; once.

        Raises:
            TrialError: Before an engine is wrapped, or a second time.
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
        """The replica that this rank belongs to."""
        return self._mpu

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether the first engine is a pipeline, which trains a whole batch in one call."""
        return bool(self.engines) and self._first.is_pipeline

    @property
    def models(self) -> list[Any]:
        """The engines that are wrapped, in their order."""
        return [view.engine for view in self.engines]

    def set_default_data(self, batches: Iterator[Any] | None) -> None:
        """Set what the engines' ``train_batch()`` and ``eval_batch()`` read without an iterator.

        Args:
            batches: Of the loader that is read now.
        """
        for model in self.models:
            if hasattr(type(model), "default_data"):
                model.default_data = batches

    def disable_auto_grad_accumulation(self) -> None:
        """Have ``train_batch`` called once a batch; it then trains all micro-batches itself."""
        self.auto_grad_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any data loader; sharding, shuffling and seeding are then the trial's affair."""
        self.dataset_checks = False

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Samples in one forward pass on one rank.

        Raises:
            TrialError: Before an engine is wrapped.
        """
        return self._first.micro_batch_size

    def get_num_micro_batches_per_slot(self) -> int:
        """Micro-batches in one batch on one rank (gradient accumulation steps).

        Raises:
            TrialError: Before an engine is wrapped.
        """
        return self._first.accumulation_steps

    def get_per_slot_batch_size(self) -> int:
        """Samples in one batch on one rank.

        Raises:
            TrialError: Before an engine is wrapped.
        """
        return self._first.micro_batch_size * self._first.accumulation_steps

    def get_global_batch_size(self) -> int:
        """Samples in one batch, over all ranks.

        Raises:
            TrialError: Before an engine is wrapped.
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
    def _first(self) -> EngineView:
        if not self.engines:
            raise TrialError(
                "no engine is wrapped yet: pass what zerotrial.initialize returns to "
                "context.wrap_model_engine in __init__"
            )
        return self.engines[0]

    # Configuration and identity

    def get_hparams(self) -> dict[str, Any]:
        """This trial's hyperparameters, nested as in the experiment file."""
        hparams: dict[str, Any] = hand_out(self._hparams)
        return hparams

    def get_hparam(self, name: str) -> Any:
        """One hyperparameter.

        Raises:
            TrialError: If there is none of this name.
        """
        try:
            return hand_out(self._hparams[name])
        except KeyError:
            names = sorted(self.spec.hparams)
            known = ", ".join(names) or "none"
            hint = suggest(str(name), names)
            raise TrialError(f"unknown hyperparameter {name!r}{hint}; there are: {known}") from None

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment's whole configuration; empty outside the platform unless given."""
        return self.spec.config

    def get_data_config(self) -> dict[str, Any]:
        """The ``data`` section of the experiment's configuration."""
        return self.spec.data

    def get_experiment_id(self) -> int:
        """The experiment's number; 0 outside the platform."""
        return self.spec.experiment_id

    def get_trial_id(self) -> int:
        """The trial's number; 0 outside the platform."""
        return self.spec.trial_id

    def get_trial_seed(self) -> int:
        """What every generator of this trial is seeded from."""
        return self.spec.trial_seed

    def get_initial_batch(self) -> int:
        """Batches that were complete when this run began."""
        ref = self.spec.latest_checkpoint
        return ref.steps_completed if ref is not None else 0

    # Data

    def to_device(self, data: Any) -> Any:
        """Move a micro-batch, nested in any way, to this rank's device."""
        return to_device(data, self.device)

    # Place in the training

    def current_train_batch(self) -> int:
        """Batches completed since the trial began.

        Raises:
            TrialError: Before training has begun.
        """
        if self._batch is None:
            raise TrialError("training has not begun")
        return self._batch

    def current_train_epoch(self) -> int:
        """Epochs completed since the trial began.

        Raises:
            TrialError: Before training has begun, or if the data has no length.
        """
        return self.current_train_batch() // self._batches_per_epoch

    def is_epoch_start(self) -> bool:
        """Whether the current batch is the first one of an epoch.

        Raises:
            TrialError: Before training has begun, or if the data has no length.
        """
        return self.current_train_batch() % self._batches_per_epoch == 0

    def is_epoch_end(self) -> bool:
        """Whether the current batch is the last one of an epoch.

        Raises:
            TrialError: Before training has begun, or if the data has no length.
        """
        return (self.current_train_batch() + 1) % self._batches_per_epoch == 0

    @property
    def _batches_per_epoch(self) -> int:
        if not self._epoch_length:
            raise TrialError("the training data has no length, so there are no epochs")
        return self._epoch_length

    def set_stop_requested(self, stop_requested: bool) -> None:  # noqa: FBT001 - the one argument
        """Ask to save a checkpoint and end the trial soon; any rank may ask."""
        self._stop_requested = bool(stop_requested)

    def get_stop_requested(self) -> bool:
        """Whether this rank has asked to end the trial."""
        return self._stop_requested

    # Metrics, profiles, TensorBoard

    def wrap_reducer(
        self,
        reducer: Any,
        name: str | None = None,
        for_training: bool = True,  # noqa: FBT001, FBT002 - Determined's signature
        for_validation: bool = True,  # noqa: FBT001, FBT002 - as above
    ) -> Any:
        """Have a metric computed from all values of all ranks.

        Args:
            reducer: A :class:`zerotrial.MetricReducer`, or a function of the flat list of values.
            name: Of the metric; leave it out when the reducer gives a dict of metrics.
            for_training: Reduce and reset it with training metrics.
            for_validation: Reduce and reset it with validation metrics.

        Returns:
            The reducer; for a function, an object with ``update(value)``.

        Raises:
            TrialError: If it is wrapped already, or neither a reducer nor callable.
        """
        return self.reducers.wrap(
            reducer, name, for_training=for_training, for_validation=for_validation
        )

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(...)``, stepped once a batch.

        Traces are kept with the trial, in ``traces/`` of the run's directory.
        """
        directory = Path(self.spec.run_dir) / "traces"
        handler = torch.profiler.tensorboard_trace_handler(
            str(directory), worker_name=f"rank_{self.distributed.rank}"
        )
        kwargs.setdefault("on_trace_ready", handler)
        self.profiler = torch.profiler.profile(*args, **kwargs)

    def get_tensorboard_path(self) -> Path:
        """Directory of this run's TensorBoard files."""
        return Path(self.spec.run_dir) / "tensorboard"

    def get_tensorboard_writer(self) -> "SummaryWriter":
        """A writer into :meth:`get_tensorboard_path`; reported metrics go there, too."""
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            suffix = "" if self.distributed.is_chief else f".rank_{self.distributed.rank}"
            self._tensorboard = SummaryWriter(
                str(self.get_tensorboard_path()), filename_suffix=suffix
            )
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:  # noqa: FBT001
        """Choose whether reported metrics go to a TensorBoard writer that the trial asked for."""
        self._tensorboard_logging = bool(enable_tensorboard_logging)

    def get_enable_tensorboard_logging(self) -> bool:
        """Whether reported metrics go to a TensorBoard writer that the trial asked for."""
        return self._tensorboard_logging

    def __getattr__(self, name: str) -> Any:
        """Name what took the place of what is not there."""
        close = suggest(name, _public(type(self)))
        raise missing("the trial context", self, name, TRIAL_CONTEXT, close)

    # For the controller

    def use_run(self, spec: RunSpec) -> None:
        """Train another run from now on: its directory, and the checkpoint that it begins with."""
        before = self.get_tensorboard_path()
        self.spec = spec
        after = self.get_tensorboard_path()
        if self._tensorboard is None or before == after:
            return
        self._tensorboard.close()
        after.mkdir(parents=True, exist_ok=True)
        if not any(before.parent.glob("*.jsonl")):  # no run has reported there: they are ours
            for file in before.iterdir():
                file.rename(after / file.name)
        self._tensorboard.log_dir = str(after)  # of the file that its next call opens

    def begin_training(self, epoch_length: int | None) -> None:
        """Note how long an epoch is."""
        self._epoch_length = epoch_length

    def enter_batch(self, batch: int) -> None:
        """Note the batch that is being trained, counted from 0."""
        self._batch = batch

    def log_to_tensorboard(self, prefix: str, steps: int, metrics: dict[str, Any]) -> None:
        """Write reported metrics where the trial has asked for a writer."""
        if self._tensorboard is not None and self._tensorboard_logging:
            for name, value in metrics.items():
                if metric_name_problem(str(name)):  # the reporter has warned
                    continue
                self._tensorboard.add_scalar(f"{prefix}/{name}", value, steps)
            self._tensorboard.flush()

    def close(self) -> None:
        """Close what the trial has opened here."""
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if name[0] != "_"]
