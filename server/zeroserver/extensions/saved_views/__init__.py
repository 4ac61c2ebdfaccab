"""Saved views of the page: filters, columns, order and chart settings under a name."""
