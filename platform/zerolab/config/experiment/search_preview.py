"""Preview of an experiment file: its search's trials and cost."""

from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.errors import ConfigError
from zerolab.schema.hyperparameters import space_warnings
from zerolab.searcher.preview import Preview

__all__ = ["estimate_search"]


def estimate_search(
    config: ExperimentConfig,
    *,
    seconds_per_batch: float | None = None,
    seconds_per_epoch: float | None = None,
    like: int | None = None,
) -> Preview:
    """Estimate a search's trials and their cost (dry run).

    Args:
        config: The experiment file.
        seconds_per_batch: Duration of one batch of a trial, for a search that counts batches.
        seconds_per_epoch: Duration of one epoch, for a search that counts epochs.
        like: The experiment from which the time is known.

    Raises:
        ConfigError: If a time has another unit than the search.
    """
    searcher = config.searcher
    times = {"batches": seconds_per_batch, "epochs": seconds_per_epoch}
    seconds = times.pop(searcher.unit, None) if searcher.unit else None
    if seconds is None and any(times.values()):
        unit = searcher.unit or "nothing: its trials decide by themselves how far they train"
        options = {"batches": "seconds_per_batch", "epochs": "seconds_per_epoch"}
        option = next(options[name] for name, value in times.items() if value)
        problem = f"{option}: must be in the unit of the search, which counts in {unit}"
        raise ConfigError("preview", [problem])
    return Preview(
        outline=searcher.outline(config.hyperparameters),
        unit=searcher.unit,
        lengths=searcher.forecast(config.hyperparameters),
        most_length=searcher.most_length(config.hyperparameters),
        slots=config.resources.slots_per_trial,
        seconds_per_unit=seconds,
        like=like,
        premise=searcher.premise,
        warnings=tuple(space_warnings(config.hyperparameters)),
    )
