"""Which bytes this process holds in tensors, by what they are.

A tensor counts by its storage, once, whoever looks at it and through however many views; that is
what the allocator gave out. Compared with :mod:`zerotrial.engine.memory` in tests, and printed by
``memory_breakdown``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from zerotrial.engine.comm.communicator import Buffer, SharedBuffer

OTHER = "other"
"""Tensors that belong to no kind: inputs, activations, what the user keeps."""


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors, each storage counted once.

    Args:
        tensors: Any; sharded ones count with this rank's part.

    Returns:
        Bytes.
    """
    return sum(_storages(tensors).values())


def census(kinds: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Walk every tensor alive in this process and tell the bytes of each kind.

    Args:
        kinds: Kind to its tensors, as :meth:`zerotrial.engine.protocols.Stage.held` gives them; a
            storage that several kinds share counts for the first.

    Returns:
        Kind to bytes, and under ``other`` the bytes that belong to none.
    """
    gc.collect()
    alive = gc.get_objects()
    # type(), not isinstance(): asking a lazy proxy for its class may run code.
    everything = _storages(found for found in alive if issubclass(type(found), Tensor))
    seen: set[tuple[str, int]] = set()
    counted: dict[str, int] = {}
    for kind, tensors in kinds.items():
        mine = {key: size for key, size in _storages(tensors).items() if key not in seen}
        seen |= mine.keys()
        counted[kind] = sum(mine.values())
    seen |= _of_other_ranks(found for found in alive if type(found) in {Buffer, SharedBuffer})
    counted[OTHER] = sum(size for key, size in everything.items() if key not in seen)
    return counted


def _of_other_ranks(shared: Iterable[Buffer | SharedBuffer]) -> set[tuple[str, int]]:
    """Memory of other ranks on this host, which this one only reads."""
    found: set[tuple[str, int]] = set()
    for memory in shared:
        if isinstance(memory, SharedBuffer):
            found |= _storages(memory.parts).keys()
        else:
            found |= _storages(memory.peers).keys() - _storages([memory.tensor]).keys()
    return found


def _storages(tensors: Iterable[Tensor]) -> dict[tuple[str, int], int]:
    """(device, address) to bytes."""
    found: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        # A DTensor's part; asked for like this since importing DTensor takes most of a second.
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.layout is not torch.strided or local.is_meta or isinstance(local, FakeTensor):
            continue
        try:
            storage = local.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            continue  # tensor subclasses without memory of their own
        if storage.nbytes():
            found[str(local.device), address] = storage.nbytes()
    return found
