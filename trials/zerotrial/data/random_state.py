"""Seeds, and the state of all random number generators of a process as plain data.

:func:`capture` returns only tensors, numbers, strings, lists and tuples, so that a checkpoint with
them loads under ``torch.load(..., weights_only=True)``.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "derive_seed", "restore", "seed_everything", "temporary_seed"]


def derive_seed(*parts: int) -> int:
    """Hash numbers into one seed of 63 bits; similar numbers yield unrelated seeds."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) & 0xFFFFFFFFFFFFFFFF
        # The finalizer of splitmix64 (Steele, Lea, Flood 2014).
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed ``random``, NumPy and torch, on the CPU and on every GPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def capture() -> dict[str, Any]:
    """Return a copy of the state of all global generators, including the current GPU's."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position)],
        "numpy_gauss": [int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the state that :func:`capture` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position = state["numpy"]
    has_gauss, cached = state["numpy_gauss"]
    legacy = (name, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.set_state(legacy)
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Seed the CPU generators for a block, then restore them."""
    saved = capture()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        restore(saved)
