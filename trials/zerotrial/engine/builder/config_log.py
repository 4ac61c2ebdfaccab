"""Log of an engine's configuration, and the observer that it selects."""

import logging
import sys

import torch
from torch import nn

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.resolved_config import format_entries, ineffective_keys, resolve
from zerotrial.engine.protocols import ENGINE_PARTS, NullObserver, Observer

__all__ = ["describe_config", "make_audible", "make_observer"]

logger = logging.getLogger("zerotrial.engine")


def make_observer(config: EngineConfig, device: torch.device, rank: int, ranks: int) -> Observer:
    """Return the observer of an engine.

    Args:
        config: Selects the output.
        device: Training device.
        rank: Global rank; only rank 0 measures and writes.
        ranks: Number of ranks.
    """
    if rank != 0 or "profiler" not in config.engine_parts.values():
        return NullObserver()
    observer: Observer = ENGINE_PARTS["profiler"](config, device, ranks)
    return observer


def describe_config(config: EngineConfig, world_size: int, model: nn.Module) -> None:
    """Log the resolved configuration, if requested, and the keys without effect in one line.

    Args:
        config: The engine's configuration.
        world_size: Number of data-parallel ranks.
        model: Model whose size limits the buckets.
    """
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    entries = resolve(config, world_size, numel)
    if config.dump_state:
        make_audible()
        logger.info("%s, on %d ranks:\n%s", config.source, world_size, format_entries(entries))
    if idle := ineffective_keys(config, entries):
        # A warning, because a plain script does not show lower levels.
        logger.warning(
            "%s: accepted, without effect: %s; `zerolab config check` shows the reason",
            config.source,
            ", ".join(idle),
        )
    for key, value, origin in entries:
        if origin.startswith("default:"):  # with a remark: it replaces another value
            logger.warning("%s: %s = %s (%s)", config.source, key, value, origin)


def make_audible() -> None:
    """Write to standard output unless the program has configured logging."""
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
