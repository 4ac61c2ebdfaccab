"""What ``benchmarks/search.py`` is made of: objectives, a simulated clock, methods, a report."""
