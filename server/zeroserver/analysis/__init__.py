"""Columns of trials: their values, filters, order and cost."""
