"""Offload to files: optimizer states, and parameters and gradients of stage 3."""
