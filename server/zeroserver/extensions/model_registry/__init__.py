"""Model registry: checkpoints with a name and a version, which retention keeps."""
