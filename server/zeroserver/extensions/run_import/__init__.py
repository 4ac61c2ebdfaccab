"""Import of runs without a server: `zerolab import`."""
