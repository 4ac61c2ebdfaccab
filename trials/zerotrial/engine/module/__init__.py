"""What is done to a user's module: units, activation checkpointing, compiling, precision."""
