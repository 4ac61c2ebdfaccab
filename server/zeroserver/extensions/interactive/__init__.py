"""Proxy for the ports of interactive tasks: notebooks, shells, TensorBoard and any command."""
