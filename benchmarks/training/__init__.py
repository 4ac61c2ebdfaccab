"""Parts of the training benchmarks: a model, other engines, processes."""
