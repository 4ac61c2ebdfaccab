"""Import of runs of other trackers, or without a server: `zerolab import`."""
