"""Commands that start, stop and watch an installation on this machine."""
