"""Parts of ``benchmarks/search.py``: objectives, a simulated clock, methods, a report."""
