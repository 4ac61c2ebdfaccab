"""Routes of the registry: checkpoints that have a name and a version, and are kept."""
