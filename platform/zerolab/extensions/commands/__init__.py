"""Less frequent commands: `task`, `job`, `pool`, `quota`, `user`, `doctor`, housekeeping."""
