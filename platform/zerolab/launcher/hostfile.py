"""Public import path of the hostfile's functions, which an extension has."""

from collections.abc import Callable

from zerolab.registry import PARTS

__all__ = ["filter_slots", "parse_hostfile"]

parse_hostfile: Callable[[str], dict[str, int]] = PARTS["hostfile"].parse_hostfile
filter_slots: Callable[..., dict[str, list[int]]] = PARTS["hostfile"].filter_slots
