"""Training from a user's script, with or without the platform."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from zerolab.config.experiment.experiment_config import load_experiment
from zerolab.config.experiment.run_overrides import apply_run_overrides
from zerolab.config.experiment.run_spec import run_spec_fields
from zerolab.config.experiment.storage import read_address
from zerolab.contract.hparam_reads import warn_of_unread
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import ENV_RUN_SPEC, CheckpointRef, RunSpec, read_run_spec
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError
from zerolab.storage.store import CheckpointStore, local_owner
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.loop.console import Console
from zerotrial.loop.fit_result import FitResult
from zerotrial.loop.run_directories import RunDirectories, in_directory, is_used
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings, Policy
from zerotrial.loop.stop_reason import StopReason
from zerotrial.loop.units import Batch, TrainUnit, read_unit
from zerotrial.ranks import Distributed
from zerotrial.trial import ZeroTrial, check_trial_class

__all__ = ["Trainer", "init"]

logger = logging.getLogger(__name__)

Length = TrainUnit | Mapping[str, int] | int
"""``Batch(n)``, ``Epoch(n)``, ``{"batches": n}``, ``{"epochs": n}``, or a number of batches."""


class _WithBlock(AbstractContextManager[ZeroTrialContext]):
    """Result of :func:`init`, which explains a forgotten ``with``."""

    def __init__(self, context: AbstractContextManager[ZeroTrialContext]) -> None:
        self._context = context

    def __enter__(self) -> ZeroTrialContext:
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: use zerotrial.init() in a with block: `with zerotrial.init() as context:`"
        )


def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: Distributed | None = None,
    enable_tensorboard_logging: bool = True,
    seed: int = 0,
    run_dir: str | Path = "zerolab_run",
) -> AbstractContextManager[ZeroTrialContext]:
    """Make the context of a trial in a user's script. **Collective**.

    Use it in a ``with`` block. The script is one rank; under torchrun it is one of several. As the
    entrypoint of an experiment it gets hyperparameters, configuration and seed there. Otherwise
    metrics go to ``metrics.jsonl`` in ``run_dir`` (``zerolab import`` uploads it to a server), and
    checkpoints to ``checkpoints/`` in the same directory.

    Args:
        hparams: Hyperparameters; inside an experiment its values take precedence.
        exp_conf: Result of ``context.get_experiment_config()`` outside an experiment. With a
            ``searcher`` it is an experiment file that defines lengths and periods. Its
            ``checkpoint_storage`` replaces ``run_dir`` for checkpoints.
        distributed: Ranks, if the script has initialized them itself.
        enable_tensorboard_logging: Whether the trial's TensorBoard writer gets reported metrics.
        seed: Seed of all generators, outside an experiment.
        run_dir: Directory of metrics, checkpoints and traces, outside an experiment. If a run has
            used it, a new run uses ``run_dir-2``, and so on: each ``fit`` is its own run.

    Returns:
        A context manager; its value is the context for the trial's class.

    Raises:
        ConfigError: If ``exp_conf`` has a searcher but is not a valid experiment file.

    Example:
        >>> with zerotrial.init(hparams={"lr": 0.1}, run_dir="digits") as context:
        ...     context.get_hparam("lr")
        0.1
    """
    return _WithBlock(
        _open_context(
            hparams,
            exp_conf,
            distributed,
            seed,
            Path(run_dir),
            tensorboard=enable_tensorboard_logging,
        )
    )


@contextmanager
def _open_context(
    hparams: Mapping[str, Any] | None,
    exp_conf: Mapping[str, Any] | None,
    distributed: Distributed | None,
    seed: int,
    run_dir: Path,
    *,
    tensorboard: bool,
) -> Iterator[ZeroTrialContext]:
    if distributed is None:
        distributed = Distributed.from_environment(cuda=torch.cuda.is_available())
    standalone = not os.environ.get(ENV_RUN_SPEC)
    directories = RunDirectories(run_dir) if standalone else None
    claimed = run_dir
    if directories is not None:
        claimed = _claim_directory(directories, distributed)
    spec = _run_spec(hparams, exp_conf, seed, claimed, distributed.size)
    context = ZeroTrialContext(spec, distributed)
    context.run_directories = directories
    context.set_enable_tensorboard_logging(tensorboard)
    random_state.seed_everything(spec.trial_seed)
    try:
        with apply_run_overrides(spec):
            yield context
    finally:
        context.close()
        if directories is not None:
            directories.release()
    if distributed.is_chief:
        warn_of_unread(spec)
    distributed.close()


class Trainer:
    """Training of a trial that a script has built.

    Args:
        trial: The trial.
        context: Context from :func:`init`.

    Raises:
        TrialError: If the loop cannot call the trial's methods.

    Example:
        >>> class Line(zerotrial.ZeroTrial):
        ...     def __init__(self, context):
        ...         config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}}
        ...         engine, *_ = zerotrial.initialize(model=torch.nn.Linear(1, 1), config=config)
        ...         self.engine = context.wrap_model_engine(engine)
        ...     def build_training_data_loader(self):
        ...         return zerotrial.DataLoader(torch.ones(64, 1), batch_size=8)
        ...     build_validation_data_loader = build_training_data_loader
        ...     def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        ...         loss = self.engine(next(dataloader_iter)).square().mean()
        ...         self.engine.backward(loss)
        ...         self.engine.step()
        ...         return loss
        ...     def evaluate_batch(self, dataloader_iter):
        ...         return {"loss": self.engine(next(dataloader_iter)).square().mean()}
        >>> with zerotrial.init() as context:
        ...     trainer = zerotrial.Trainer(Line(context), context)
        ...     result = trainer.fit(max_length=16)
        >>> result.steps_completed
        16
    """

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext) -> None:
        if isinstance(trial, type) or not hasattr(trial, "train_batch"):
            problem = f"trial: must be an instance of a ZeroTrial, got {trial!r}"
            if isinstance(trial, type):
                problem += f"; write Trainer({trial.__name__}(context), context)"
            raise ConfigError("Trainer()", [problem])
        check_trial_class(type(trial), is_built=True)
        self._trial = trial
        self._context = context

    def fit(  # noqa: PLR0917 - Determined's signature
        self,
        checkpoint_period: Length | None = None,
        validation_period: Length | None = None,
        max_length: Length | None = None,
        reporting_period: Length | None = None,
        checkpoint_policy: Policy | None = None,
        latest_checkpoint: str | Path | None = None,
        step_zero_validation: bool | None = None,  # noqa: FBT001 - Determined's signature
        test_mode: bool = False,  # noqa: FBT001, FBT002 - as above
        profiling_enabled: bool | None = None,  # noqa: FBT001 - as above
    ) -> FitResult:
        """Train, validate, checkpoint and report until ``max_length``. **Collective**.

        Omitted arguments default to the experiment's configuration, if there is one. A script
        without a platform logs its progress to ``zerotrial.progress``, which writes to standard
        error unless the script has configured logging.

        Args:
            checkpoint_period: Period of checkpoints; one more is saved at the end.
            validation_period: Period of validations; one more runs at the end.
            max_length: Total length, across restarts: ``Batch(1000)``, ``Epoch(3)``,
                ``{"epochs": 3}``, or a number of batches. Periods have the same forms.
            reporting_period: Period of reports of training metrics. The default is every 100
                batches, and the first 100 at increasing intervals.
            checkpoint_policy: Validations after which to save: ``best``, ``all`` or ``none``.
            latest_checkpoint: Checkpoint to resume from: a uuid in the run's checkpoints (or at
                least its first four characters), the path of a checkpoint, or ``latest`` for the
                last checkpoint of the newest run (without one, training starts at batch 0). The fit
                then continues in the directory of the run that saved it. Any other fit starts a new
                run in a new directory: ``run_dir``, ``run_dir-2``, ...
                Inside an experiment the platform chooses the checkpoint.
            step_zero_validation: Validate before the first batch.
            test_mode: Run one batch, one validation batch and one checkpoint.
            profiling_enabled: Report timings of the loop.

        Returns:
            The history of the metrics, the metrics of the last validation, the checkpoints, and the
            reason why training ended. It equals the number of that reason.

        Raises:
            ConfigError: If no length is given, or a length is invalid.
            SystemExit: Inside an experiment, if the run must release its slots.

        Example:
            >>> # Line is the trial in the example of zerotrial.Trainer.
            >>> with zerotrial.init() as context:
            ...     trainer = zerotrial.Trainer(Line(context), context)
            ...     result = trainer.fit(max_length={"epochs": 2}, validation_period={"epochs": 1})
            >>> result.summary, result.history.validation["loss"].steps
            ('finished after 16 batches', [8, 16])
        """
        context, spec = self._context, self._context.spec
        lengths = _read_units(
            checkpoint_period=checkpoint_period,
            validation_period=validation_period,
            max_length=max_length,
            reporting_period=reporting_period,
        )
        if test_mode or spec.test_mode:
            lengths["max_length"] = Batch(1)
        overrides = {
            "checkpoint_period": lengths["checkpoint_period"],
            "validation_period": lengths["validation_period"],
            "max_length": lengths["max_length"],
            "report_period": lengths["reporting_period"],
            "checkpoint_policy": checkpoint_policy,
            "initial_validation": step_zero_validation,
        }
        overrides = {name: value for name, value in overrides.items() if value is not None}
        settings = _settings(spec, overrides)
        if profiling_enabled is not None:
            profiling = msgspec.structs.replace(settings.profiling, enabled=profiling_enabled)
            settings = dataclasses.replace(settings, profiling=profiling)
        if test_mode or spec.test_mode:
            settings = dataclasses.replace(settings, test_mode=True)
        if context.run_directories is not None:
            _begin_run(context, context.run_directories, latest_checkpoint)
        session = Session(context)
        stop_reason = None
        console: Console | None = None
        try:
            controller = session.make_controller(self._trial, settings)
            controller.record_history()
            if not os.environ.get(ENV_RUN_SPEC) and context.distributed.is_chief:
                console = controller.show_progress()
            stop_reason = controller.run()
            result = controller.result(stop_reason)
            if console is not None:
                console.end(result)
        finally:
            if console is not None:
                console.close()
            session.close(stop_reason)
        if os.environ.get(ENV_RUN_SPEC) and stop_reason in _EXIT_REASONS:
            if stop_reason is not StopReason.STALE:
                context.distributed.close()
            raise SystemExit(stop_reason.exit_code)
        return result


_EXIT_REASONS = frozenset({StopReason.PREEMPTED, StopReason.REACHED, StopReason.STALE})
"""Reasons after which the script must exit."""


def _read_units(**lengths: Length | None) -> dict[str, TrainUnit | None]:
    """Convert all lengths and periods.

    Raises:
        ConfigError: With all invalid ones.
    """
    units: dict[str, TrainUnit | None] = {}
    problems: list[str] = []
    for name, value in lengths.items():
        try:
            units[name] = None if value is None else read_unit(name, value)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError("fit", problems)
    return units


def _run_spec(
    hparams: Mapping[str, Any] | None,
    exp_conf: Mapping[str, Any] | None,
    seed: int,
    run_dir: Path,
    slots: int,
) -> RunSpec:
    path = os.environ.get(ENV_RUN_SPEC)
    if path:
        return read_run_spec(Path(path))
    sections: dict[str, Any] = {}
    address = StorageAddress(root=str(run_dir / "checkpoints"))
    storage = (exp_conf or {}).get("checkpoint_storage")
    if isinstance(storage, Mapping):
        address = read_address(storage) or address
    if exp_conf and "searcher" in exp_conf:
        sections = run_spec_fields(load_experiment({"entrypoint": "python", **exp_conf}))
    return RunSpec(
        **sections,
        config=mask_secrets(exp_conf or {}, for_trial=True),
        experiment_id=0,
        trial_id=0,
        run_id=0,
        hparams=dict(hparams or {}),
        trial_seed=seed,
        slots=slots,
        model_dir=str(Path.cwd()),
        run_dir=str(run_dir),
        checkpoint_dir=address.root,
        storage_options=address.options,
        storage_owner=local_owner(address, str(run_dir)),
        checkpoint_cache=str(run_dir / "cache"),
    )


def _settings(spec: RunSpec, overrides: dict[str, Any]) -> FitSettings:
    if spec.fit is not None:
        return FitSettings.from_spec(spec.fit, **overrides)
    if "max_length" not in overrides:
        problem = (
            "max_length: is missing; set the length of training, such as Batch(1000) or Epoch(3)"
        )
        raise ConfigError("fit", [problem])
    return FitSettings(early_reports="report_period" not in overrides, **overrides)


def _claim_directory(directories: RunDirectories, ranks: Distributed) -> Path:
    """Claim the directory of a new run. **Collective**."""
    claimed = str(directories.claim()) if ranks.is_chief else None
    return Path(str(ranks.broadcast(claimed, "claiming a run directory")))


def _begin_run(
    context: ZeroTrialContext, directories: RunDirectories, checkpoint: str | Path | None
) -> None:
    """Start a run in a new directory, or continue the run of a checkpoint. **Collective**.

    Raises:
        ConfigError: If ``checkpoint`` is neither a uuid nor a path.
        NotFoundError: If the checkpoint does not exist.
    """
    ranks = context.distributed
    choice: tuple[CheckpointRef | None, Path] | None = None
    with ranks.together("the run cannot start"):
        if ranks.is_chief:
            ref = (
                None
                if checkpoint is None
                else _resolve_checkpoint(context.spec, directories, checkpoint)
            )
            path = None if ref is None else directories.find(ref.uuid)
            if path is None:
                path = Path(context.spec.run_dir)
                path = directories.claim() if is_used(path) else path
            choice = ref, path
    choice = ranks.broadcast(choice, "choosing a run directory")
    assert choice is not None
    ref, path = choice
    spec = in_directory(context.spec, path)
    if ref is not None and ref.root == spec.checkpoint_dir:
        ref = msgspec.structs.replace(ref, root="")
    context.use_run(msgspec.structs.replace(spec, latest_checkpoint=ref))


def _resolve_checkpoint(
    spec: RunSpec, directories: RunDirectories, checkpoint: str | Path
) -> CheckpointRef | None:
    """Return the checkpoint that the script names; None for ``latest`` if there is none."""
    path, name = Path(checkpoint), str(checkpoint)
    store, root = CheckpointStore.of_run(spec), ""
    inside = spec.checkpoint_dir == str(Path(spec.run_dir) / "checkpoints")
    if path.is_dir():
        root, name = str(path.absolute().parent), path.absolute().name
        store = CheckpointStore(root)
    elif name == "latest" and inside:
        return directories.latest()
    elif name == "latest":
        latest = store.latest()
        return None if latest is None else CheckpointRef(latest.uuid, latest.steps_completed)
    else:
        stores = [store, *map(CheckpointStore, directories.checkpoints())] if inside else [store]
        name = _full_uuid(stores, name)
        run_directory = directories.find(name) if inside else None
        if run_directory is not None:
            root = str(run_directory / "checkpoints")
            store = CheckpointStore(root)
    description = store.describe(name)
    return CheckpointRef(description.uuid, description.steps_completed, root=root)


def _full_uuid(stores: Sequence[CheckpointStore], name: str) -> str:
    """Return the uuid of the only checkpoint with a prefix; without a match, the prefix.

    Raises:
        ConfigError: If several checkpoints have the prefix.
    """
    if not 4 <= len(name) < 36:
        return name
    uuids = {checkpoint.uuid for store in stores for checkpoint in store.list()}
    matches = sorted(uuid for uuid in uuids if uuid.startswith(name.lower()))
    if len(matches) > 1:
        problem = f"must name one checkpoint, got {name!r}, which several begin with"
        raise ConfigError("fit", [f"latest_checkpoint: {problem}: {', '.join(matches)}"])
    return matches[0] if matches else name
