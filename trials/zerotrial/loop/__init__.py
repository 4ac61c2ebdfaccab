"""Training loop of a trial: train, validate, checkpoint, report and stop."""
