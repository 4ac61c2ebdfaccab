"""Restore and check of the server's database: `zerolab db`."""
