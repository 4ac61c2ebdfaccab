"""``deepspeed.checkpointing``: torch's activation checkpointing, and Megatron's random states."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from zerotrial.engine.module.random_states import (
    MODEL_PARALLEL,
    NAMED_STATES,
    kept_for_recomputation,
    seed_generator,
    set_generator_state,
)
from zerotrial.engine.module.random_states import NamedStates as CudaRNGStatesTracker

__all__ = [
    "_CUDA_RNG_STATE_TRACKER",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "CudaRNGStatesTracker",
    "_set_cuda_rng_state",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "reset",
]

logger = logging.getLogger(__name__)

_CUDA_RNG_STATE_TRACKER = NAMED_STATES
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL

_configured = False
_mpu: Any = None

_APART = 2718
"""Between the seed that all tensor-parallel ranks share and the first of their own; Megatron's."""


def configure(  # noqa: PLR0917 - DeepSpeed's arguments, in its order
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,  # noqa: FBT001
    contiguous_checkpointing: bool | None = None,  # noqa: FBT001
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,  # noqa: FBT001
    synchronize: bool | None = None,  # noqa: FBT001
    profile: bool | None = None,  # noqa: FBT001
) -> None:
    """Take note, and say what has no effect: that stands in the engine file.

    Args:
        mpu_: Tells :func:`model_parallel_cuda_manual_seed` the tensor-parallel rank; None: 0.
        deepspeed_config: Not read: the engine reads its own.
        partition_activations: False.
        contiguous_checkpointing: False.
        num_checkpoints: 0.
        checkpoint_in_cpu: False.
        synchronize: False.
        profile: False.
    """
    global _configured, _mpu
    asked = {
        "deepspeed_config": deepspeed_config is not None,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    if any(asked.values()):
        logger.warning(
            "checkpointing.configure(): %s: no effect here; set activation_checkpointing in the "
            "engine file",
            ", ".join(name for name, value in asked.items() if value),
        )
    _configured, _mpu = True, mpu_


def is_configured() -> bool:
    """Whether :func:`configure` has been called."""
    return _configured


def reset() -> None:
    """Do nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function, and again in backward instead of keeping its activations.

    Args:
        function: Called with ``args`` and ``kwargs``.
        args: Its arguments.
        kwargs: Its arguments by name; torch's ``use_reentrant`` is accepted and has no effect.
    """
    kwargs.pop("use_reentrant", None)
    call = functools.partial(function, **kwargs) if kwargs else function
    return checkpoint_of_torch(call, *args, use_reentrant=False, **kept_for_recomputation())


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Restore the state of this process's generator, on the GPU or else on the CPU."""
    del device
    set_generator_state(new_state)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the states from which layers draw within a ``fork()``."""
    return NAMED_STATES


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Begin the random states of a tensor-parallel rank.

    Args:
        seed: Of what all tensor-parallel ranks draw alike. What each draws for itself, in a fork of
            the tracker, begins at another one.
    """
    seed_generator(seed)
    NAMED_STATES.reset()
    NAMED_STATES.add(MODEL_PARALLEL, seed + _APART + _tensor_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Begin anew what this tensor-parallel rank draws for itself, and nothing else."""
    with NAMED_STATES.fork():
        seed_generator(seed + _APART + _tensor_rank())


def _tensor_rank() -> int:
    for name in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        rank = getattr(_mpu, f"get_{name}_rank", None)
        if rank is not None:
            return int(rank())
    return 0
