"""Former name of :mod:`zerolab.searcher.predefined`, for custom searchers that import it."""

from zerolab.searcher.predefined import FixedTrialsSearcher as ListedSearcher
from zerolab.searcher.predefined import trial_rng

__all__ = ["ListedSearcher", "trial_rng"]
