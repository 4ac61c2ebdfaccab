"""What the trials of an experiment tell together: columns, cost, the best so far, importance."""
