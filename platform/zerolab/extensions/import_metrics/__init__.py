"""Import of metrics files of runs without a server: `zerolab import`."""
