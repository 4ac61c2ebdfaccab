"""Interactive tasks: notebooks, shells, TensorBoard and commands with a port, in the queue."""
