"""An experiment file as a preview: what its search comes to."""

from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.errors import ConfigError
from zerolab.schema.hyperparameters import space_warnings
from zerolab.searcher.preview import Preview

__all__ = ["preview_of"]


def preview_of(
    config: ExperimentConfig,
    *,
    seconds_per_batch: float | None = None,
    seconds_per_epoch: float | None = None,
    like: int | None = None,
) -> Preview:
    """Say which trials there will be and what they cost.

    Args:
        config: The experiment file.
        seconds_per_batch: How long one batch of a trial takes; for a search that counts in them.
        seconds_per_epoch: The same for epochs.
        like: The experiment from which the time is known.

    Raises:
        ConfigError: If a time is given for another unit than the search counts in.
    """
    searcher = config.searcher
    times = {"batches": seconds_per_batch, "epochs": seconds_per_epoch}
    seconds = times.pop(searcher.unit, None) if searcher.unit else None
    if seconds is None and any(times.values()):
        unit = searcher.unit or "nothing: its trials decide by themselves how far they train"
        options = {"batches": "seconds_per_batch", "epochs": "seconds_per_epoch"}
        given = next(options[name] for name, value in times.items() if value)
        problem = f"{given}: must be in the unit of the search, which counts in {unit}"
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
