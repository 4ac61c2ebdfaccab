"""Contracts between processes: variables, exit codes, files of a run, message bodies."""
