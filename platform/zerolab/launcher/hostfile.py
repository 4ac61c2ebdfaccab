"""Which machines and slots a multi-node run uses: see :mod:`zerolab.config.hostfile`."""

from zerolab.config.hostfile import filter_slots, parse_hostfile

__all__ = ["filter_slots", "parse_hostfile"]
