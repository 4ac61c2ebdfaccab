"""Full tensors of an engine by name: reading, writing, and export to one file."""
