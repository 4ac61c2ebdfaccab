"""Retention, removal and registration of checkpoints."""
