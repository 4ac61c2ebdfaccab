"""Changes of a user's module: units, activation checkpointing, compilation, precision."""
