"""What the benchmarks of training are made of: a model, the engines beside ours, processes."""
