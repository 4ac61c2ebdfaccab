"""Conversion of DeepSpeed's checkpoints to Zerolab's format."""
