"""``tpe_asha``: one ladder of lengths, and proposals by a tree-structured Parzen estimator."""
