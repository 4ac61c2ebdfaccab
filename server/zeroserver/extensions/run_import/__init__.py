"""Import of runs that had no server: `zerolab import`."""
