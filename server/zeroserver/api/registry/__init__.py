"""Routes of the model registry: checkpoints with a name and a version, which are kept."""
