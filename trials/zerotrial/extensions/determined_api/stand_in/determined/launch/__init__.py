"""Determined's launchers: Zerolab has started the ranks, so they only run the command."""
