"""What configuration files are made of: sections, hints, lengths, and spaces of hyperparameters."""
