"""What an engine answers beside training and checkpoints."""
