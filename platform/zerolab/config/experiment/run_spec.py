"""Conversion of an experiment's configuration to fields of a run specification."""

from typing import Any

from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.config.experiment.resources import fewer_slots
from zerolab.contract.spec import (
    ENV_AS_DEEPSPEED,
    ENV_AS_DETERMINED,
    ENV_AS_WANDB,
    FitSpec,
    HostSlots,
    LengthSpec,
    ProfilingSpec,
)
from zerolab.registry import PARTS
from zerolab.schema.lengths import Length

__all__ = ["run_spec_fields", "variables_of"]


def run_spec_fields(config: ExperimentConfig) -> dict[str, Any]:
    """Return the fields of a :class:`~zerolab.contract.spec.RunSpec` from a configuration.

    Args:
        config: The experiment's configuration.
    """
    stage = config.data.get("stage")
    return {
        "entrypoint": parse_entrypoint(config.entrypoint),
        "fit": _fit(config),
        "variables": variables_of(config),
        "python": config.environment.python or "",
        "data": config.data,
        "stage": None if stage is None else PARTS["stage"].stage_spec(stage),
        "hosts": tuple(
            HostSlots(host, tuple(slots)) for host, slots in (config.resources.hosts or {}).items()
        ),
        "fewer": tuple(fewer_slots(config.resources)) if config.resources.hosts else (),
        "ssh_config": config.resources.ssh_config or "",
    }


def _fit(config: ExperimentConfig) -> FitSpec:
    searcher, profiling = config.searcher, config.profiling
    return FitSpec(
        max_length=_length(searcher.full_length),
        validate_at=searcher.validate_at(),
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
        scheduling_unit=config.scheduling_unit,
        validation_period=_length(config.min_validation_period),
        checkpoint_period=_length(config.min_checkpoint_period),
        checkpoint_policy=config.checkpoint_policy,
        initial_validation=config.perform_initial_validation,
        records_per_epoch=config.records_per_epoch,
        profiling=ProfilingSpec(
            enabled=profiling.enabled,
            begin_on_batch=profiling.begin_on_batch,
            end_after_batch=profiling.end_after_batch,
            sync_timings=profiling.sync_timings,
        ),
    )


def _length(length: Length | None) -> LengthSpec | None:
    """Convert a length; zero means never."""
    return LengthSpec(length.unit, length.count) if length and length.count else None


def variables_of(config: ExperimentConfig) -> dict[str, dict[str, str]]:
    """Return the environment variables of an experiment's ranks, by kind of slot.

    Args:
        config: The experiment's configuration.
    """
    variables = config.environment.environment_variables
    lines = {"cpu": variables.cpu, "cuda": variables.cuda}
    replaced = {
        ENV_AS_DEEPSPEED: config.environment.deepspeed,
        ENV_AS_DETERMINED: config.environment.determined,
        ENV_AS_WANDB: config.environment.wandb,
    }
    always = {name: "1" for name, setting in replaced.items() if setting is not None}
    return {
        kind: always | dict(line.split("=", 1) for line in assignments)
        for kind, assignments in lines.items()
    }
