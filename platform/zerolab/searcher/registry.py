"""Registry of the searchers; others are added as extensions.

A new searcher is one file and one entry point of the group ``zerolab.searchers``.
"""

from zerolab.registry import Registry, subclass_of
from zerolab.searcher.asha.section import AdaptiveAshaConfig, AsyncHalvingConfig
from zerolab.searcher.grid_search import GridConfig
from zerolab.searcher.random_search import RandomConfig
from zerolab.searcher.section import SearcherConfig
from zerolab.searcher.single_trial import SingleConfig

__all__ = ["SEARCHERS"]


SEARCHERS: Registry[type[SearcherConfig]] = Registry(
    "zerolab.searchers",
    {
        "single": SingleConfig,
        "random": RandomConfig,
        "grid": GridConfig,
        "async_halving": AsyncHalvingConfig,
        "adaptive_asha": AdaptiveAshaConfig,
    },
    subclass_of(SearcherConfig),  # type: ignore[type-abstract]
)
"""Values of ``searcher.name``, with the configuration section of each."""
