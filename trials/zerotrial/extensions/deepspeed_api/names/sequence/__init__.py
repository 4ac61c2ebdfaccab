"""Contents of ``deepspeed.sequence``."""
