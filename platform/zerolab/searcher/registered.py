"""The searchers that there are: a new one is one file, and one line here."""

from zerolab.searcher.grid_search import GridConfig
from zerolab.searcher.random_search import RandomConfig
from zerolab.searcher.section import SearcherConfig
from zerolab.searcher.single_trial import SingleConfig

__all__ = ["SEARCHERS"]

SEARCHERS: dict[str, type[SearcherConfig]] = {
    "single": SingleConfig,
    "random": RandomConfig,
    "grid": GridConfig,
}
"""What ``searcher.name`` may be, and the section that says the rest."""
