"""DeepSpeed's checkpoints, made into ours."""
