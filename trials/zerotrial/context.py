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
from zerolab.reports.media_reports import MediaReports
from zerolab.reports.reporter import Reporter
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


class ZeroTrialContext(MediaReports, NamesReplacements):
    """Interface of a trial's code to the platform.

    The harness or :func:`zerotrial.init` makes it. A trial gets it in ``__init__``.

    Args:
        spec: Specification of the run that this process belongs to.
        distributed: Ranks of the run.

    Example:
        >>> with zerotrial.init(hparams={"lr": 0.1}) as context:
        ...     context.get_hparam("lr"), context.device.type, context.distributed.size
        (0.1, 'cpu', 1)
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
        self._warned_of_media = False
        self.run_directories: RunDirectories | None = None
        """Run directories of a script outside an experiment."""
        self.reporter: Reporter | None = None
        """The run's reporter, while it trains; None on all ranks but the chief."""
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

        Example:
            >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.get_global_batch_size()
            8
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
            logger.warning("data is sharded for the first engine, not for this pipeline")
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Set the model-parallel unit of this rank.

        Needed only if the engine cannot know it, as with model parallelism of another library.

        Args:
            mpu: Replica of this rank, and whether the rank reads data and reports metrics.

        Raises:
            TrialError: If no engine is wrapped, or on a second call.

        Example:
            >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.set_mpu(zerotrial.ModelParallelUnit(0, 1))
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
        """Whether the first engine is a pipeline.

        The loop then calls ``train_batch`` once for a full batch.
        """
        return bool(self.engines) and self._first_engine.is_pipeline

    @property
    def models(self) -> list[Any]:
        """Wrapped engines, in the order of wrapping."""
        return [view.engine for view in self.engines]

    def set_default_data(self, batches: Iterator[Any] | None) -> None:
        """Set the iterator that the engines' ``train_batch()`` and ``eval_batch()`` default to.

        The loop calls it before training and before each validation.

        Args:
            batches: Iterator over the current loader; None removes it.

        Example:
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.set_default_data(iter([torch.zeros(2, 4)]))
            ...     engine.eval_batch().shape
            torch.Size([2, 1])
        """
        for model in self.models:
            if hasattr(type(model), "default_data"):
                model.default_data = batches

    def disable_auto_grad_accumulation(self) -> None:
        """Call ``train_batch`` once per batch; it must then train all micro-batches itself.

        Call it in the trial's ``__init__``.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.disable_auto_grad_accumulation()
            ...     context.auto_grad_accumulation
            False
        """
        self.auto_grad_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any data loader instead of :class:`zerotrial.DataLoader`.

        The trial is then responsible for sharding by rank and for seeding. Call it in ``__init__``.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.disable_dataset_reproducibility_checks()
            ...     context.dataset_checks
            False
        """
        self.dataset_checks = False

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples in one forward pass on one rank.

        Returns:
            The first engine's ``train_micro_batch_size_per_gpu``.

        Raises:
            TrialError: If no engine is wrapped.

        Example:
            >>> config = {"train_batch_size": 8, "gradient_accumulation_steps": 2,
            ...           "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.get_train_micro_batch_size_per_gpu()
            4
        """
        return self._first_engine.micro_batch_size

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the micro-batches in one batch on one rank.

        Returns:
            The first engine's ``gradient_accumulation_steps``.

        Raises:
            TrialError: If no engine is wrapped.

        Example:
            >>> config = {"train_batch_size": 8, "gradient_accumulation_steps": 2,
            ...           "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.get_num_micro_batches_per_slot()
            2
        """
        return self._first_engine.accumulation_steps

    def get_per_slot_batch_size(self) -> int:
        """Return the samples in one batch on one rank.

        Returns:
            Micro-batch size times accumulation steps.

        Raises:
            TrialError: If no engine is wrapped.

        Example:
            >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.get_per_slot_batch_size()
            8
        """
        return self._first_engine.micro_batch_size * self._first_engine.accumulation_steps

    def get_global_batch_size(self) -> int:
        """Return the samples in one batch, over all ranks.

        Returns:
            Micro-batch size times accumulation steps times data-parallel ranks.

        Raises:
            TrialError: If no engine is wrapped.

        Example:
            >>> config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
            >>> with zerotrial.init() as context:
            ...     engine, *_ = zerotrial.initialize(model=torch.nn.Linear(4, 1), config=config)
            ...     engine = context.wrap_model_engine(engine)
            ...     context.get_global_batch_size()
            8
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
        """Return this trial's hyperparameters, nested as in the experiment file.

        Returns:
            A dict of names to values; groups are dicts.

        Example:
            >>> with zerotrial.init(hparams={"lr": 0.1, "layers": {"width": 8}}) as context:
            ...     context.get_hparams()["layers"]["width"]
            8
        """
        hparams: dict[str, Any] = as_trial_hparams(self._hparams)
        return hparams

    def get_hparam(self, name: str) -> Any:
        """Return one hyperparameter of this trial.

        Args:
            name: Name of a hyperparameter, or of a group of them.

        Returns:
            The value; a dict for a group.

        Raises:
            TrialError: If the name is unknown.

        Example:
            >>> with zerotrial.init(hparams={"lr": 0.1}) as context:
            ...     context.get_hparam("lr")
            0.1
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
        """Return the experiment's configuration.

        Returns:
            Content of the experiment file with all defaults; outside the platform ``exp_conf`` of
            :func:`zerotrial.init`. Secrets are masked.

        Example:
            >>> with zerotrial.init(exp_conf={"name": "digits"}) as context:
            ...     context.get_experiment_config()["name"]
            'digits'
        """
        return self.spec.config

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of the experiment's configuration.

        Returns:
            A dict that belongs to the trial; empty if the file has no such section.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_data_config()
            {}
        """
        return self.spec.data

    def get_experiment_id(self) -> int:
        """Return the number of the experiment.

        Returns:
            The number; 0 outside the platform.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_experiment_id()
            0
        """
        return self.spec.experiment_id

    def get_trial_id(self) -> int:
        """Return the number of the trial.

        Returns:
            The number, unique on the server; 0 outside the platform.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_trial_id()
            0
        """
        return self.spec.trial_id

    def get_trial_seed(self) -> int:
        """Return the seed of all random number generators of this trial.

        Returns:
            From 0 to 2**31 - 1; outside the platform ``seed`` of :func:`zerotrial.init`.

        Example:
            >>> with zerotrial.init(seed=7) as context:
            ...     context.get_trial_seed()
            7
        """
        return self.spec.trial_seed

    def get_initial_batch(self) -> int:
        """Return the batches completed before this run.

        Returns:
            Batches of the checkpoint to resume from; 0 at the first start.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_initial_batch()
            0
        """
        ref = self.spec.latest_checkpoint
        return ref.steps_completed if ref is not None else 0

    # Data

    def to_device(self, data: Any) -> Any:
        """Move a micro-batch, nested in any way, to this rank's device.

        Args:
            data: Tensors, arrays; or mappings, lists and tuples of these.

        Returns:
            Data of the same structure on ``context.device``; see :func:`zerotrial.to_device`.

        Example:
            >>> with zerotrial.init() as context:
            ...     x, y = context.to_device((torch.zeros(2, 3), torch.zeros(2)))
            >>> x.shape
            torch.Size([2, 3])
        """
        return to_device(data, self.device)

    # Position in training

    def current_train_batch(self) -> int:
        """Return the index of the current batch, across restarts.

        Returns:
            Batches completed since the trial began.

        Raises:
            TrialError: If training has not begun.

        Example:
            >>> class MyTrial(zerotrial.ZeroTrial):
            ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            ...         if self.context.current_train_batch() % 100 == 0:
            ...             print("epoch", self.context.current_train_epoch())
        """
        if self._batch is None:
            raise TrialError("training has not begun")
        return self._batch

    def current_train_epoch(self) -> int:
        """Return the epochs completed since the trial began.

        Returns:
            Index of the current epoch, from 0.

        Raises:
            TrialError: If training has not begun, or the data has no length.

        Example:
            >>> class MyTrial(zerotrial.ZeroTrial):
            ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            ...         assert self.context.current_train_epoch() == epoch_idx
        """
        return self.current_train_batch() // self._batches_per_epoch

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first one of an epoch.

        Returns:
            True in the first batch.

        Raises:
            TrialError: If training has not begun, or the data has no length.

        Example:
            >>> class MyTrial(zerotrial.ZeroTrial):
            ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            ...         if self.context.is_epoch_start():
            ...             self.correct = 0
        """
        return self.current_train_batch() % self._batches_per_epoch == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last one of an epoch.

        Returns:
            True in the last batch.

        Raises:
            TrialError: If training has not begun, or the data has no length.

        Example:
            >>> class MyTrial(zerotrial.ZeroTrial):
            ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            ...         if self.context.is_epoch_end():
            ...             print("epoch", epoch_idx, "finished")
        """
        return (self.current_train_batch() + 1) % self._batches_per_epoch == 0

    @property
    def _batches_per_epoch(self) -> int:
        if not self._epoch_length:
            raise TrialError("the training data has no length, so there are no epochs")
        return self._epoch_length

    def set_stop_requested(self, stop_requested: bool) -> None:  # noqa: FBT001 - its only argument
        """Request to save a checkpoint and end the trial soon.

        A request of one rank is enough. The loop stops after the current batch.

        Args:
            stop_requested: True to stop; False withdraws a request that the loop has not seen.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.set_stop_requested(True)
            ...     context.get_stop_requested()
            True
        """
        self._stop_requested = bool(stop_requested)

    def get_stop_requested(self) -> bool:
        """Return whether this rank has requested to end the trial.

        Returns:
            The last value of :meth:`set_stop_requested`; other ranks are not considered.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_stop_requested()
            False
        """
        return self._stop_requested

    # Alerts, metrics, profiles, TensorBoard

    def alert(self, title: str, text: str = "") -> None:
        """Send a message to the log and to notification channels.

        Every rank may call it; only the chief's messages count. It neither waits for the server nor
        fails. Channels get at most ten alerts of an experiment in an hour.

        Args:
            title: At most 200 characters; the rest is cut off.
            text: At most 4,000 characters; the rest is cut off.

        Example:
            >>> class MyTrial(zerotrial.ZeroTrial):
            ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            ...         if self.loss > 8:
            ...             self.context.alert("Loss spike", f"loss {self.loss:.1f}")
        """
        if self.reporter is not None:
            self.reporter.report_alert(title, text)
        elif self.distributed.is_chief:  # before or after training
            logger.warning("alert: %s", title)

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

        Example:
            >>> import statistics
            >>> with zerotrial.init() as context:
            ...     median = context.wrap_reducer(statistics.median, name="median_loss")
            ...     median.update(0.25)  # in train_batch or evaluate_batch
        """
        if type(self.reducers) is MetricReducers:
            self.reducers = TRIAL_PARTS["metric_reducers"]()
        reducers: Any = self.reducers
        return reducers.wrap(
            reducer, name, for_training=for_training, for_validation=for_validation
        )

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(...)``, one profiler step per batch.

        Traces go to ``traces/`` in the run's directory. Call it in the trial's ``__init__``.

        Args:
            args: Positional arguments of ``torch.profiler.profile``.
            kwargs: Keyword arguments of ``torch.profiler.profile``.

        Example:
            >>> with zerotrial.init() as context:
            ...     schedule = torch.profiler.schedule(wait=10, warmup=2, active=3, repeat=1)
            ...     context.set_profiler(schedule=schedule)
        """
        directory = Path(self.spec.run_dir) / "traces"
        handler = torch.profiler.tensorboard_trace_handler(
            str(directory), worker_name=f"rank_{self.distributed.rank}"
        )
        kwargs.setdefault("on_trace_ready", handler)
        self.profiler = torch.profiler.profile(*args, **kwargs)

    def get_tensorboard_path(self) -> Path:
        """Return the directory of this run's TensorBoard files.

        Returns:
            ``tensorboard`` in the run's directory; it may not exist yet.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_tensorboard_path().name
            'tensorboard'
        """
        return Path(self.spec.run_dir) / "tensorboard"

    def get_tensorboard_writer(self) -> "SummaryWriter":
        """Return a writer of this run's TensorBoard files.

        The loop also writes all reported metrics to it, see :meth:`set_enable_tensorboard_logging`.

        Returns:
            The same ``SummaryWriter`` at each call; files are in :meth:`get_tensorboard_path`.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_tensorboard_writer().add_scalar("lr", 0.1, 100)
        """
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            suffix = "" if self.distributed.is_chief else f".rank_{self.distributed.rank}"
            self._tensorboard = SummaryWriter(
                str(self.get_tensorboard_path()), filename_suffix=suffix
            )
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:  # noqa: FBT001
        """Set whether the trial's TensorBoard writer gets reported metrics.

        Args:
            enable_tensorboard_logging: False if the trial writes all metrics itself.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.set_enable_tensorboard_logging(False)
            ...     context.get_enable_tensorboard_logging()
            False
        """
        self._tensorboard_logging = bool(enable_tensorboard_logging)

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether the trial's TensorBoard writer gets reported metrics.

        Returns:
            True by default.

        Example:
            >>> with zerotrial.init() as context:
            ...     context.get_enable_tensorboard_logging()
            True
        """
        return self._tensorboard_logging

    def _media_reporter(self) -> Reporter | None:
        if self.reporter is None and self.distributed.is_chief and not self._warned_of_media:
            self._warned_of_media = True
            logger.warning("media are discarded: the run has not begun, or has ended")
        return self.reporter

    def _media_step(self) -> int:
        return self.get_initial_batch() if self._batch is None else self._batch + 1

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
