"""Registry of the searchers; others are added as extensions.

A new searcher is one file and one entry point of the group ``zerolab.searchers``.
"""

from typing import Any

from zerolab.registry import Registry
from zerolab.searcher.asha.adaptive_asha import AdaptiveAshaConfig
from zerolab.searcher.asha.async_halving import AsyncHalvingConfig
from zerolab.searcher.grid_search import GridConfig
from zerolab.searcher.random_search import RandomConfig
from zerolab.searcher.section import SearcherConfig
from zerolab.searcher.single_trial import SingleConfig

__all__ = ["SEARCHERS"]


def _section(loaded: Any) -> type[SearcherConfig]:
    if not (isinstance(loaded, type) and issubclass(loaded, SearcherConfig)):
        raise TypeError(f"must be a subclass of SearcherConfig, got {loaded!r}")
    return loaded


SEARCHERS: Registry[type[SearcherConfig]] = Registry(
    "zerolab.searchers",
    {
        "single": SingleConfig,
        "random": RandomConfig,
        "grid": GridConfig,
        "async_halving": AsyncHalvingConfig,
        "adaptive_asha": AdaptiveAshaConfig,
    },
    _section,
)
"""Values of ``searcher.name``, with the configuration section of each."""
