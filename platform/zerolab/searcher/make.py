"""From configuration to searcher."""

from collections.abc import Mapping
from random import Random
from typing import Any

from zerolab.config.experiment.hyperparameters import grid_points, sample_hyperparameters
from zerolab.config.experiment.sections import SearcherConfig
from zerolab.config.section import validate
from zerolab.errors import ConfigError
from zerolab.searcher.interface import Searcher
from zerolab.searcher.listed import ListedSearcher

__all__ = ["make_searcher"]


def make_searcher(
    searcher_config: SearcherConfig | Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    seed: int,
) -> Searcher:
    """Make the searcher that a configuration names.

    Args:
        searcher_config: The ``searcher`` block of an experiment file.
        hyperparameters: Its ``hyperparameters`` block.
        seed: The experiment's seed; the same seed gives the same trials.

    Raises:
        ConfigError: If the block or a hyperparameter is not a valid one.
    """
    config = _read(searcher_config)
    length = config.max_length.count if config.max_length else 0

    def sample(_trial_id: int, rng: Random) -> dict[str, Any]:
        return sample_hyperparameters(hyperparameters, rng)

    if config.name == "single":
        return ListedSearcher(sample, 1, 1, seed, length, replaces_invalid=False)
    if config.name == "random":
        if config.max_trials is None:
            problem = "max_trials: is required by the random searcher, got nothing"
            raise ConfigError("searcher", [problem])
        total, concurrent = config.max_trials, config.max_concurrent_trials
        return ListedSearcher(sample, total, concurrent, seed, length, replaces_invalid=True)
    points = grid_points(hyperparameters)

    def point(trial_id: int, _rng: Random) -> dict[str, Any]:
        return points[trial_id - 1]

    concurrent = config.max_concurrent_trials
    return ListedSearcher(point, len(points), concurrent, seed, length, replaces_invalid=False)


def _read(config: SearcherConfig | Mapping[str, Any]) -> SearcherConfig:
    if isinstance(config, SearcherConfig):
        return config
    read, problems, _ = validate(SearcherConfig, config)
    if problems or read is None:
        raise ConfigError("searcher", problems)
    return read
