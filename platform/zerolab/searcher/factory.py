"""Construction of searchers from configurations."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from zerolab.errors import ConfigError
from zerolab.searcher.interface import Searcher

if TYPE_CHECKING:  # imported lazily, with the first experiment
    from zerolab.searcher.section import SearcherConfig

__all__ = ["make_searcher", "read_section"]


def make_searcher(
    searcher_config: "SearcherConfig | Mapping[str, Any]",
    hyperparameters: Mapping[str, Any],
    seed: int,
) -> Searcher:
    """Make the searcher that a configuration names.

    Args:
        searcher_config: The ``searcher`` block of an experiment file.
        hyperparameters: Its ``hyperparameters`` block.
        seed: The experiment's seed; the same seed gives the same trials.

    Returns:
        A searcher without trials; call ``initial_operations`` first.

    Raises:
        ConfigError: If the block or a hyperparameter is invalid.

    Example:
        >>> from zerolab.searcher import make_searcher
        >>> block = {"name": "random", "metric": "loss", "max_trials": 2, "max_length": 100}
        >>> space = {"lr": {"type": "double", "minval": 0, "maxval": 1}}
        >>> searcher = make_searcher(block, space, seed=1)
        >>> [operation.trial_id for operation in searcher.initial_operations()]
        [1, 2]
    """
    if isinstance(searcher_config, Mapping):
        searcher_config = read_section(searcher_config)
    problems = list(searcher_config.problems(hyperparameters))
    if problems:
        raise ConfigError("searcher", problems)
    return searcher_config.make(hyperparameters, seed)


def read_section(block: Mapping[str, Any]) -> "SearcherConfig":
    """Read the ``searcher`` block of an experiment file.

    Raises:
        ConfigError: If it is invalid.
    """
    from zerolab.schema.section import OneOf, Section, validate
    from zerolab.searcher.registry import SEARCHERS
    from zerolab.searcher.section import SearcherConfig

    class File(Section):
        searcher: Annotated[SearcherConfig, OneOf(SEARCHERS)]

    file, problems, _ = validate(File, {"searcher": dict(block)})
    if problems or file is None:
        raise ConfigError("searcher", problems)
    return file.searcher
