"""DeepSpeed's checkpoints, made into ours, and ours into DeepSpeed's."""
