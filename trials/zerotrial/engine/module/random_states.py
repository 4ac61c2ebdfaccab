"""Random states that have names, Megatron's way: within a fork of one, what is random comes of it.

A tensor-parallel rank drops elements of a part of its own from a state of its own, and elements of
what is whole on all ranks from the state that all share.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zerolab.errors import EngineError

__all__ = [
    "MODEL_PARALLEL",
    "NAMED_STATES",
    "NamedStates",
    "kept_for_recomputation",
    "seed_generator",
    "set_generator_state",
]

MODEL_PARALLEL = "model-parallel-rng"
"""The name that Megatron's layers mean when they give none."""


class NamedStates:
    """States of this process's generator on the GPU, or on the CPU where there is none."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """Begin a state.

        Args:
            name: Of the state.
            seed: Not that of another one, which would give the same numbers.

        Raises:
            EngineError: If there is one of this name or seed.
        """
        if name in self._states or seed in self._seeds:
            what = f"name {name!r}" if name in self._states else f"seed {seed}"
            msg = f"random states: the {what} is taken; call reset() first, to begin them anew"
            raise EngineError(msg)
        self._states[name] = torch.Generator(_device()).manual_seed(seed).get_state()
        self._seeds.add(seed)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Have what is random in a ``with`` block come from a state, which goes on there.

        Raises:
            EngineError: If there is no such state.
        """
        if name not in self._states:
            there = ", ".join(map(repr, self._states)) or "there are none"
            msg = f"random states: must be one that was added, got {name!r} ({there}); call "
            raise EngineError(f"{msg}model_parallel_cuda_manual_seed(seed), or add(name, seed)")
        before = _get()
        set_generator_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get()
            set_generator_state(before)

    def get_states(self) -> dict[str, Tensor]:
        """Copy them all, by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Put others in their place, as :meth:`get_states` gave them."""
        self._states = {name: state.clone() for name, state in states.items()}

    def reset(self) -> None:
        """Forget them all."""
        self._states.clear()
        self._seeds.clear()


NAMED_STATES = NamedStates()
"""This process's; checkpoints of engines have them beside the state of each generator."""


def kept_for_recomputation() -> dict[str, Any]:
    """Arguments of ``torch.utils.checkpoint`` with which the named states are kept, too.

    It keeps the generator's state by itself. Empty where no state has a name.
    """
    return {"context_fn": _contexts} if NAMED_STATES.get_states() else {}


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _as_in_forward(NAMED_STATES.get_states())


@contextmanager
def _as_in_forward(states: Mapping[str, Tensor]) -> Iterator[None]:
    now = NAMED_STATES.get_states()
    NAMED_STATES.set_states(states)
    try:
        yield
    finally:
        NAMED_STATES.set_states(now)


def seed_generator(seed: int) -> None:
    """Begin the generator of which the states are anew, outside of a fork or within."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _get() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def set_generator_state(state: Tensor) -> None:
    """Restore the state of the generator on the GPU, or on the CPU where there is none."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
