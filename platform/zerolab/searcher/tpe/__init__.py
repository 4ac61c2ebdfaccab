"""``tpe_asha``: one ladder of lengths, and proposals by a Gaussian process and by densities."""
