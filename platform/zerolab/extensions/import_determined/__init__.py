"""Import of the database of Determined, from a dump: `zerolab import`."""
