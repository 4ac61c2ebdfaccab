"""Detection of user writes to weights whose masters are elsewhere.

Otherwise a value written to a 16-bit weight would last only until the next update, which starts
from the master: a loaded state dict, clipped weights, a copied average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.flat.layout import Bucket
from zerotrial.engine.protocols import Updater

__all__ = ["WeightWrites"]


class WeightWrites:
    """Detector of writes to parameters, by autograd's version counters.

    ``parameter.data`` has a separate counter, so writes through it are not detected.

    Args:
        buckets: Buckets of the stage.
        weights: Weights of each bucket, (N * S,).
        owned: Part of each bucket that this rank updates.
        updater: Owner of the masters.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        weights: Sequence[Tensor],
        owned: Sequence[slice],
        updater: Updater,
    ) -> None:
        self._buckets = list(zip(buckets, weights, owned, strict=True))
        self._updater = updater
        self._counts = self._versions()

    def _versions(self) -> list[list[int]]:
        # The stage writes to buffers, not to parameters, which leaves the counters alone.
        return [
            [slot.parameter._version for slot in bucket.slots]  # noqa: SLF001 - no public name
            for bucket, _, _ in self._buckets
        ]

    def forget(self) -> None:
        """Regard the weights as unwritten: the masters have just been loaded."""
        self._counts = self._versions()

    def update_masters(self) -> None:
        """Copy values written since the last call into the masters.

        Only elements that differ from their rounded master: the others keep full precision.
        """
        before, self._counts = self._counts, self._versions()
        for (bucket, weights, owned), old, new in zip(
            self._buckets, before, self._counts, strict=True
        ):
            if old == new:
                continue
            with self._updater.states(bucket.index, write=True) as states:
                for slot, previous, count in zip(bucket.slots, old, new, strict=True):
                    start, stop = max(slot.start, owned.start), min(slot.stop, owned.stop)
                    if previous != count and start < stop:
                        part = slice(start - owned.start, stop - owned.start)
                        _update_master(weights[start:stop], states["master"][part])


def _update_master(weights: Tensor, master: Tensor) -> None:
    values = weights.to(master.device)
    unchanged = values == master.to(values.dtype)
    master.copy_(torch.where(unchanged, master, values.to(master.dtype)))
