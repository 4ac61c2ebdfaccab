"""What a controller does with a trial: train, validate, checkpoint, report, stop in time."""
