"""Registry of the searchers; a new searcher is one file and one line here."""

from zerolab.searcher.asha.adaptive_asha import AdaptiveAshaConfig
from zerolab.searcher.asha.async_halving import AsyncHalvingConfig
from zerolab.searcher.custom import CustomConfig
from zerolab.searcher.grid_search import GridConfig
from zerolab.searcher.pbt import PbtConfig
from zerolab.searcher.random_search import RandomConfig
from zerolab.searcher.section import SearcherConfig
from zerolab.searcher.single_trial import SingleConfig
from zerolab.searcher.tpe.section import TpeAshaConfig

__all__ = ["SEARCHERS"]

SEARCHERS: dict[str, type[SearcherConfig]] = {
    "single": SingleConfig,
    "random": RandomConfig,
    "grid": GridConfig,
    "async_halving": AsyncHalvingConfig,
    "adaptive_asha": AdaptiveAshaConfig,
    "pbt": PbtConfig,
    "tpe_asha": TpeAshaConfig,
    "custom": CustomConfig,
}
"""Values of ``searcher.name``, with the configuration section of each."""
