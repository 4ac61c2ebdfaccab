"""Comments on experiments."""
