"""Profiler: breakdowns of a step's time and memory, FLOP counts, traces, TensorBoard and CSV."""
