"""Weights that user code writes to between steps, where the masters lie elsewhere.

Without this, what was written to a 16-bit weight would last until the next update, which starts
from the master: a state dict loaded into the module, clipped weights, an average copied in.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zerotrial.engine.flat.layout import Bucket
from zerotrial.engine.protocols import Updater

__all__ = ["WrittenWeights"]


class WrittenWeights:
    """Finds what was written, by autograd's own count of writes in place.

    ``parameter.data`` has a count of its own, so that a write through it is not seen.

    Args:
        buckets: Of the stage.
        weights: Of each bucket, (N * S,).
        owned: Part of each bucket that this rank updates.
        updater: Has the masters.
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
        self._counts = self._read()

    def _read(self) -> list[list[int]]:
        # The stage writes to buffers and not to parameters, which does not count.
        return [
            [place.parameter._version for place in bucket.places]  # noqa: SLF001 - no public name
            for bucket, _, _ in self._buckets
        ]

    def forget(self) -> None:
        """Take the weights as they are for unwritten: the masters have just been loaded."""
        self._counts = self._read()

    def adopt(self) -> None:
        """Take over into the masters what was written since the last call.

        Only elements that are not their master's rounded value: the others keep all their bits.
        """
        before, self._counts = self._counts, self._read()
        for (bucket, weights, own), old, new in zip(
            self._buckets, before, self._counts, strict=True
        ):
            if old == new:
                continue
            with self._updater.states(bucket.index, write=True) as states:
                for place, was, count in zip(bucket.places, old, new, strict=True):
                    start, stop = max(place.start, own.start), min(place.stop, own.stop)
                    if was != count and start < stop:
                        cut = slice(start - own.start, stop - own.start)
                        _adopt(weights[start:stop], states["master"][cut])


def _adopt(written: Tensor, master: Tensor) -> None:
    found = written.to(master.device)
    unchanged = found == master.to(found.dtype)
    master.copy_(torch.where(unchanged, master, found.to(master.dtype)))
