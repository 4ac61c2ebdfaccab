"""The experiment file: its sections, and the space of hyperparameters."""
