"""Storage of the inputs of blocks whose activations are recomputed in backward.

With ``cpu_checkpointing`` they wait in host memory; with ``partition_activations`` each
tensor-parallel rank keeps a part of replicated inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from zerotrial.engine.builder.activation_checkpointing import Forward, Recompute

if TYPE_CHECKING:
    from zerotrial.engine.protocols import TensorRanks

__all__ = ["BlockInputs", "InputStorage", "StoredTensor", "recomputing_from_storage"]

_SAMPLE_NUMEL = 64
"""Largest number of sampled elements that show whether an input is equal on all ranks."""


def recomputing_from_storage(ranks: TensorRanks | None, *, on_host: bool) -> Recompute:
    """Return a wrapper that keeps the inputs of a computation and recomputes it in backward.

    Args:
        ranks: Ranks that each keep a part of replicated inputs; None: each keeps all.
        on_host: Whether inputs are kept in host memory.
    """
    return lambda forward: _recomputed_from_storage(forward, InputStorage(ranks, on_host=on_host))


@dataclass(frozen=True)
class InputStorage:
    """Storage policy of a block's inputs until backward."""

    ranks: TensorRanks | None
    """Ranks that each keep a part of replicated inputs."""

    on_host: bool
    replicated: dict[tuple[int, int], bool] = field(default_factory=dict)
    """Whether inputs are replicated, by number and index of the input, as far as known."""

    def divides(self, leaf: Tensor, key: tuple[int, int]) -> bool:
        """Return whether each rank keeps a part of an input. **Collective** while unknown.

        The output of a layer sharded by columns differs between ranks. One comparison shows it,
        except for a tensor of equal numbers, which is inconclusive.
        """
        if self.ranks is None or not leaf.is_floating_point() or not leaf.numel():
            return False
        if key not in self.replicated:
            flat = leaf.detach().reshape(-1)
            sample = flat[:: -(-flat.numel() // _SAMPLE_NUMEL)].float()
            samples = self.ranks.gather(sample, 0).view(self.ranks.size, -1)
            if bool((samples == samples[0, 0]).all()):
                return False
            self.replicated[key] = torch.allclose(
                samples, samples[:1].expand_as(samples), rtol=1e-2
            )
        return self.replicated[key]


def _recomputed_from_storage(forward: Forward, keep: InputStorage) -> Forward:
    """Wrap a computation like :func:`recomputed`, with its inputs stored by a policy."""

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        waiting = BlockInputs(leaves, keep)

        def compute(_device: Tensor | None) -> Any:
            inner_args, inner_kwargs = tree_unflatten(waiting.take(), structure)
            return forward(*inner_args, **inner_kwargs)

        # An empty tensor shows checkpoint() the device whose random state to save.
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
        return checkpoint(compute, torch.empty(0, device=device), use_reentrant=False)

    return call


class BlockInputs:
    """Inputs of a block: the originals for the forward, restored ones for the backward.

    Args:
        leaves: Tensors and other values.
        keep: Storage policy.
    """

    def __init__(self, leaves: list[Any], keep: InputStorage) -> None:
        self._fresh: list[Any] | None = leaves
        self._stored = [
            _store(leaf, keep, (len(leaves), index)) for index, leaf in enumerate(leaves)
        ]

    def take(self) -> list[Any]:
        """Return the inputs on their devices; the originals only the first time."""
        if self._fresh is not None:
            fresh, self._fresh = self._fresh, None
            return fresh
        return [
            stored.restore() if isinstance(stored, StoredTensor) else stored
            for stored in self._stored
        ]


class StoredTensor:
    """Stored tensor, in part or in host memory, with the data to restore it."""

    def __init__(self, tensor: Tensor, ranks: TensorRanks | None, *, on_host: bool) -> None:
        self._device, self._shape = tensor.device, tensor.shape
        self._requires_grad = tensor.requires_grad
        self._ranks = ranks
        source = tensor.detach()
        if self._ranks is not None:
            source = _local_part(source.reshape(-1), self._ranks)
        if on_host and source.device.type != "cpu":
            pinned = source.device.type == "cuda"
            on_host_ = torch.empty_like(source, device="cpu", pin_memory=pinned)
            source = on_host_.copy_(source, non_blocking=pinned)
        self.values = source

    def restore(self) -> Tensor:
        """Restore the tensor. **Collective** if each rank has a part."""
        tensor = self.values.to(self._device, non_blocking=True)
        if self._ranks is not None:
            tensor = self._ranks.gather(tensor, 0)[: self._shape.numel()].view(self._shape)
        return tensor.requires_grad_(self._requires_grad)


def _local_part(flat: Tensor, ranks: TensorRanks) -> Tensor:
    """Return a copy of this rank's part, padded to equal length."""
    length = -(-flat.numel() // ranks.size)
    part = flat.new_zeros(length)
    local = flat[ranks.rank * length : (ranks.rank + 1) * length]
    part[: local.numel()].copy_(local)
    return part


def _store(leaf: Any, keep: InputStorage, key: tuple[int, int]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    ranks = keep.ranks if keep.divides(leaf, key) else None
    if ranks is None and (leaf.device.type == "cpu" or not keep.on_host):
        return leaf
    return StoredTensor(leaf, ranks, on_host=keep.on_host)
