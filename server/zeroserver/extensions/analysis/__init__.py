"""Analysis of experiments: columns of trials, best value so far, hyperparameter importance."""
