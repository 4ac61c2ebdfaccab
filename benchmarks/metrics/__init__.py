"""Benchmarks of metrics: reports of a training, import and export."""
