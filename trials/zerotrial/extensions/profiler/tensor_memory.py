"""Memory of this process's tensors by kind.

A tensor counts by its storage, once, regardless of its number of views; that is the memory that the
allocator returned. Tests compare it with :mod:`zerotrial.engine.memory`; ``memory_breakdown``
prints it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zerotrial.engine.comm.communicator import Buffer, SharedBuffer

OTHER = "other"
"""Tensors of no kind: inputs, activations, the user's tensors."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage counted once.

    Args:
        tensors: Any tensors; sharded ones count with this rank's part.

    Returns:
        Bytes.
    """
    return sum(_storages(tensors).values())


def tensor_bytes_by_kind(kinds: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Return the bytes of each kind over all tensors in this process.

    Args:
        kinds: Kind to tensors, see ``Stage.tensors_by_kind``; a storage of several kinds counts
            for the first.

    Returns:
        Kind to bytes, and under ``other`` the bytes of no kind.
    """
    gc.collect()
    alive = gc.get_objects()
    # type(), not isinstance(): a lazy proxy's __class__ may run code.
    everything = _storages(object_ for object_ in alive if issubclass(type(object_), Tensor))
    seen: set[tuple[str, int]] = set()
    counted: dict[str, int] = {}
    for kind, tensors in kinds.items():
        storages = {key: size for key, size in _storages(tensors).items() if key not in seen}
        seen |= storages.keys()
        counted[kind] = sum(storages.values())
    seen |= _of_other_ranks(object_ for object_ in alive if type(object_) in {Buffer, SharedBuffer})
    counted[OTHER] = sum(size for key, size in everything.items() if key not in seen)
    return counted


def _of_other_ranks(shared: Iterable[Buffer | SharedBuffer]) -> set[tuple[str, int]]:
    """Return the memory of other ranks on this host, which this one only reads."""
    storages: set[tuple[str, int]] = set()
    for memory in shared:
        if isinstance(memory, SharedBuffer):
            storages |= _storages(memory.parts).keys()
        else:
            storages |= _storages(memory.peers).keys() - _storages([memory.tensor]).keys()
    return storages


def _storages(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """Map (device, address) to bytes."""
    sizes: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        # A DTensor's local part, found by name: importing DTensor takes most of a second.
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.layout is not torch.strided or local.is_meta or isinstance(local, FakeTensor):
            continue
        try:
            storage = local.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            continue  # tensor subclasses without their own memory
        if storage.nbytes():
            sizes[str(local.device), address] = storage.nbytes()
    return sizes
