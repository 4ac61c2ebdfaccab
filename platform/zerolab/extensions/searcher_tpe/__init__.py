"""``tpe_asha``: one ladder of rungs, with proposals by a Gaussian process and Parzen densities."""
