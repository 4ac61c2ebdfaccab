"""Storage of reports from runs: metrics, progress, checkpoints and logs, exactly once."""
