"""Size of tensors in memory."""

from collections.abc import Iterable

from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage counted once; sharded ones with their own part."""
    storages = (getattr(t, "_local_tensor", t).untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
