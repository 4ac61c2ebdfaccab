"""Analysis of an experiment's trials: columns, cost, best so far, hyperparameter importance."""
