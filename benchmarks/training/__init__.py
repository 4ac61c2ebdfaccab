"""What ``benchmarks/engine.py`` is made of: a model, the engines beside ours, their processes."""
