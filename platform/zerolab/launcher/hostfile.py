"""Alias of :mod:`zerolab.config.hostfile`."""

from zerolab.config.hostfile import combination_problems, filter_slots, parse_hostfile

__all__ = ["combination_problems", "filter_slots", "parse_hostfile"]
