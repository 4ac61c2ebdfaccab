"""Parts of configuration files: sections, hints, lengths and hyperparameter spaces."""
