"""Asynchronous successive halving: trials are compared at rungs and the best are promoted.

References:
    Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020 (ASHA); eta is
    called ``divisor`` here, R ``max_time``. Several parallel brackets as in Hyperband (Li et al.,
    JMLR 2018). Rungs and brackets are computed as Determined computes them.
"""

from zerolab.searcher.asha.rung_sizes import Bracket, make_brackets, make_rungs, simulate

__all__ = ["Bracket", "make_brackets", "make_rungs", "simulate"]
