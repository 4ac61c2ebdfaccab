"""What a run reports: metrics, progress, checkpoints and logs, each stored exactly once."""
