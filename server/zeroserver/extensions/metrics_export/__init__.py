"""Export of all metric points of an experiment: `zerolab experiment metrics`, and its route."""
