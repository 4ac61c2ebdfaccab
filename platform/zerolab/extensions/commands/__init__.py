"""Commands that not every user needs: `task`, `job`, `pool`, `quota`, `doctor`, housekeeping."""
