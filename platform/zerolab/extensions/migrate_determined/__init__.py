"""Hints for users of Determined: what replaces its names, commands and keys."""
