"""Training without the platform, or from a script of one's own inside it."""

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from zerolab.config import load_experiment
from zerolab.config.experiment.run_overrides import determined_by_run
from zerolab.config.experiment.run_spec import sections_of
from zerolab.config.experiment.storage import read_address
from zerolab.contract.hparam_reads import warn_of_unread
from zerolab.contract.secrets import mask_secrets
from zerolab.contract.spec import ENV_RUN_SPEC, CheckpointRef, RunSpec, read_run_spec
from zerolab.contract.storage import StorageAddress
from zerolab.errors import ConfigError
from zerolab.storage.store import CheckpointStore, local_owner
from zerotrial.context import ZeroTrialContext
from zerotrial.data import random_state
from zerotrial.loop.run_directories import RunDirectories, in_directory, is_used
from zerotrial.loop.session import Session
from zerotrial.loop.settings import FitSettings, Policy
from zerotrial.loop.stop_reason import Ending
from zerotrial.loop.units import Batch, TrainUnit, read_unit
from zerotrial.ranks import Distributed
from zerotrial.trial import ZeroTrial

__all__ = ["Trainer", "init"]

logger = logging.getLogger(__name__)

Length = TrainUnit | Mapping[str, int] | int
"""``Batch(n)``, ``Epoch(n)``, ``{"batches": n}``, ``{"epochs": n}``, or a number of batches."""


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: Distributed | None = None,
    enable_tensorboard_logging: bool = True,
    seed: int = 0,
    run_dir: str | Path = "zerolab_run",
) -> Iterator[ZeroTrialContext]:
    """Make the context of a trial in a script of one's own.

    Run plainly, the script is one rank; under torchrun it is one of many; as the entrypoint of an
    experiment it takes hyperparameters, configuration and seed from there. Otherwise metrics go
    to ``metrics.jsonl`` below ``run_dir`` (``zerolab import`` brings it into a server), and
    checkpoints to ``checkpoints/`` beside it.

    Args:
        hparams: Hyperparameters; those of the experiment win inside one.
        exp_conf: What ``context.get_experiment_config()`` gives outside an experiment. With a
            ``searcher`` it is read as an experiment file, and says how far to train and when to do
            what. A ``checkpoint_storage`` in it says where checkpoints go instead of ``run_dir``.
        distributed: The ranks, where the script has joined them itself.
        enable_tensorboard_logging: Whether metrics go to a writer that the trial asks for.
        seed: Of everything, outside an experiment.
        run_dir: Directory of metrics, checkpoints and traces, outside an experiment. Where a run
            has used it, a new one uses ``run_dir-2``, and so on: each ``fit`` is a run of its own.

    Yields:
        The context, to be given to the trial's class.

    Raises:
        ConfigError: If ``exp_conf`` is no experiment file though it has a searcher.
    """
    if distributed is None:
        distributed = Distributed.from_environment(cuda=torch.cuda.is_available())
    alone = not os.environ.get(ENV_RUN_SPEC)
    directories = RunDirectories(Path(run_dir)) if alone else None
    claimed = Path(run_dir)
    if directories is not None:
        claimed = _claim(directories, distributed)
    spec = _run_spec(hparams, exp_conf, seed, claimed, distributed.size)
    context = ZeroTrialContext(spec, distributed)
    context.run_directories = directories
    context.set_enable_tensorboard_logging(enable_tensorboard_logging)
    random_state.seed_everything(spec.trial_seed)
    try:
        with determined_by_run(spec):
            yield context
    except BaseException:
        context.close()
        raise
    context.close()
    if distributed.is_chief:
        warn_of_unread(spec)
    distributed.close()


class Trainer:
    """Runs a trial that a script has built.

    Args:
        trial: The trial.
        context: From :func:`init`.
    """

    def __init__(self, trial: ZeroTrial, context: ZeroTrialContext) -> None:
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
    ) -> Ending:
        """Train, validate, checkpoint and report until ``max_length``. **Collective**.

        What is left out is taken from the experiment's configuration where there is one. A script
        without a platform shows its progress through the logger ``zerotrial.progress``, which
        writes to standard error where the script has set up no logging.

        Args:
            checkpoint_period: How often to save; always at the end.
            validation_period: How often to validate; always at the end.
            max_length: How far to train in all, restarts included: ``Batch(1000)``,
                ``Epoch(3)``, ``{"epochs": 3}``, or a number of batches. Periods are written alike.
            reporting_period: How often to report training metrics; every 100 batches when left out,
                and the first 100 at increasing intervals.
            checkpoint_policy: After which validations to save: ``best``, ``all`` or ``none``.
            latest_checkpoint: Where to go on: a uuid in the run's checkpoints (its first four
                characters or more will do), the path of a checkpoint, or ``latest`` for the
                furthest one of the newest run (none is a fresh start). The fit then continues in
                the directory of the run that saved it; any other fit begins a new run, in a
                directory of its own: ``run_dir``, ``run_dir-2``, ...
                Inside an experiment the platform knows it.
            step_zero_validation: Validate before the first batch.
            test_mode: One batch, one validation batch, one checkpoint.
            profiling_enabled: Report where the loop's time goes.

        Returns:
            Why training ended.

        Raises:
            ConfigError: If no length is given, or one that cannot be read.
            SystemExit: Inside an experiment, when the run must give its slots back.
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
        given = {
            "checkpoint_period": lengths["checkpoint_period"],
            "validation_period": lengths["validation_period"],
            "max_length": lengths["max_length"],
            "report_period": lengths["reporting_period"],
            "checkpoint_policy": checkpoint_policy,
            "initial_validation": step_zero_validation,
        }
        given = {name: value for name, value in given.items() if value is not None}
        settings = _settings(spec, given)
        if profiling_enabled is not None:
            profiling = msgspec.structs.replace(settings.profiling, enabled=profiling_enabled)
            settings = dataclasses.replace(settings, profiling=profiling)
        if test_mode or spec.test_mode:
            settings = dataclasses.replace(settings, test_mode=True)
        if context.run_directories is not None:
            _begin_run(context, context.run_directories, latest_checkpoint)
        session = Session(context)
        ending = None
        try:
            controller = session.control(self._trial, settings)
            alone = not os.environ.get(ENV_RUN_SPEC) and context.distributed.is_chief
            console = controller.show_progress() if alone else None
            ending = controller.run()
            if console is not None:
                console.end(controller.steps, controller.last_checkpoint)
        finally:
            session.close(ending)
        if os.environ.get(ENV_RUN_SPEC) and ending in _LEFT:
            if ending is not Ending.STALE:
                context.distributed.close()
            raise SystemExit(ending.exit_code)
        return ending


_LEFT = frozenset({Ending.PREEMPTED, Ending.REACHED, Ending.STALE})
"""Endings after which the process has nothing more to do."""


def _read_units(**given: Length | None) -> dict[str, TrainUnit | None]:
    """Read all lengths and periods.

    Raises:
        ConfigError: With every one that cannot be read.
    """
    units: dict[str, TrainUnit | None] = {}
    problems: list[str] = []
    for name, value in given.items():
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
        sections = sections_of(load_experiment({"entrypoint": "python", **exp_conf}))
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


def _settings(spec: RunSpec, given: dict[str, Any]) -> FitSettings:
    if spec.fit is not None:
        return FitSettings.from_spec(spec.fit, **given)
    if "max_length" not in given:
        problem = "max_length: is missing; say how far to train, e.g. Batch(1000) or Epoch(3)"
        raise ConfigError("fit", [problem])
    return FitSettings(early_reports="report_period" not in given, **given)


def _claim(directories: RunDirectories, ranks: Distributed) -> Path:
    """Claim the directory of a new run. **Collective**."""
    claimed = str(directories.claim()) if ranks.is_chief else None
    return Path(str(ranks.broadcast(claimed, "claiming a run directory")))


def _begin_run(
    context: ZeroTrialContext, directories: RunDirectories, checkpoint: str | Path | None
) -> None:
    """Begin a run in a directory of its own, or continue the one of a checkpoint. **Collective**.

    Raises:
        ConfigError: If ``checkpoint`` is not the uuid or the path of one.
        NotFoundError: If there is no such checkpoint.
    """
    ranks = context.distributed
    chosen: tuple[CheckpointRef | None, Path] | None = None
    with ranks.together("the run cannot begin"):
        if ranks.is_chief:
            ref = None if checkpoint is None else _resolve(context.spec, directories, checkpoint)
            path = None if ref is None else directories.find(ref.uuid)
            if path is None:
                path = Path(context.spec.run_dir)
                path = directories.claim() if is_used(path) else path
            chosen = ref, path
    chosen = ranks.broadcast(chosen, "choosing a run directory")
    assert chosen is not None
    ref, path = chosen
    spec = in_directory(context.spec, path)
    if ref is not None and ref.root == spec.checkpoint_dir:
        ref = msgspec.structs.replace(ref, root="")
    context.use_run(msgspec.structs.replace(spec, latest_checkpoint=ref))


def _resolve(
    spec: RunSpec, directories: RunDirectories, checkpoint: str | Path
) -> CheckpointRef | None:
    """Return the checkpoint that the script names; None for ``latest`` where there is none."""
    path, name = Path(checkpoint), str(checkpoint)
    store, root = CheckpointStore.of_run(spec), ""
    inside = spec.checkpoint_dir == str(Path(spec.run_dir) / "checkpoints")
    if path.is_dir():
        root, name = str(path.absolute().parent), path.absolute().name
        store = CheckpointStore(root)
    elif name == "latest" and inside:
        return directories.latest()
    elif name == "latest":
        found = store.latest()
        return None if found is None else CheckpointRef(found.uuid, found.steps_completed)
    else:
        stores = [store, *map(CheckpointStore, directories.checkpoints())] if inside else [store]
        name = _full_uuid(stores, name)
        home = directories.find(name) if inside else None
        if home is not None:
            root = str(home / "checkpoints")
            store = CheckpointStore(root)
    found = store.describe(name)
    return CheckpointRef(found.uuid, found.steps_completed, root=root)


def _full_uuid(stores: Sequence[CheckpointStore], name: str) -> str:
    """Return the uuid of the one checkpoint that begins with a name; else the name itself.

    Raises:
        ConfigError: If several begin with it.
    """
    if not 4 <= len(name) < 36:
        return name
    known = {each.uuid for store in stores for each in store.list()}
    found = sorted(uuid for uuid in known if uuid.startswith(name.lower()))
    if len(found) > 1:
        told = f"must name one checkpoint, got {name!r}, with which several begin"
        raise ConfigError("fit", [f"latest_checkpoint: {told}: {', '.join(found)}"])
    return found[0] if found else name
