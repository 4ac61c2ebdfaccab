"""Replacements of modules of other trackers."""
