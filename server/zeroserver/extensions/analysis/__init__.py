"""Analysis of experiments: columns of their trials, best so far, hyperparameter importance."""
