"""Routes of searches: state, analysis, cost preview and custom searchers."""
