"""An exception on one rank of a batch, which all ranks hear of.

A schedule is a fixed order of sends and receives: a rank that left it would leave its neighbours
waiting until the timeout. So a rank whose layers or loss raise goes through the rest of the batch
without computing, and sends zeros in place of activations and gradients. At the end all ranks learn
of it together, and drop the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from zerolab.errors import EngineError

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Mesh

__all__ = ["Failures"]

logger = logging.getLogger(__name__)

_AROUND = "failed to run forward", "Failed to run stage backward"
"""In what torch's stages put around a layer's exception, one or the other."""


@dataclass(frozen=True, order=True)
class _Told:
    """What the other ranks are told; in the order in which one may have led to another."""

    micro_batch: int
    stage: int
    rank: int
    cause: str

    def __str__(self) -> str:
        where = f"rank {self.rank} (pipeline stage {self.stage}), micro-batch {self.micro_batch}"
        return f"{where}: {self.cause}"


class Failures:
    """What has failed in one batch: on this rank the first exception, at the end on all.

    Args:
        mesh: Of the engine.
        call: Of the engine, for messages.
        gathers: Whether layers gather their weights, as at ZeRO stage 3.
    """

    def __init__(self, mesh: Mesh, call: str, *, gathers: bool) -> None:
        self._mesh = mesh
        self._call = call
        self._at_once = gathers or mesh.tensor.size > 1
        self._error: Exception | None = None
        self._micro_batch = 0

    def __bool__(self) -> bool:
        """Whether anything has failed on this rank."""
        return self._error is not None

    @contextmanager
    def noting(self, micro_batch: int) -> Iterator[None]:
        """Keep an exception of what runs inside, in place of raising it.

        Ranks that compute one layer together, along the tensor axis, or gather its weights, wait
        for each other inside of it, where no end of the batch would be reached: there it is raised
        at once.

        Args:
            micro_batch: That it works on; from 0.
        """
        try:
            yield
        except Exception as error:
            if self._at_once:
                raise
            self.note(error, micro_batch)

    def note(self, error: Exception, micro_batch: int) -> None:
        """Keep an exception, if it is the first.

        Args:
            error: As a layer raised it, or with what torch's stages put around it.
            micro_batch: See :meth:`noting`.
        """
        if self._error is None:
            text = str(error)
            around = type(error) is RuntimeError and any(words in text for words in _AROUND)
            inner = error.__cause__ if around else None
            self._error = inner if isinstance(inner, Exception) else error
            self._micro_batch = micro_batch
            logger.error(
                "%s(): %s. All ranks raise at the end of this batch", self._call, self._own
            )

    @property
    def _own(self) -> _Told | None:
        if self._error is None:
            return None
        first = (str(self._error).strip().splitlines() or [""])[0]
        cause = f"{type(self._error).__name__}: {first}" if first else type(self._error).__name__
        rank = dist.get_rank() if dist.is_initialized() else 0
        return _Told(self._micro_batch, self._mesh.pipe.rank, rank, cause)

    def raise_everywhere(self) -> None:
        """Raise on all ranks of the mesh, at least one of which has failed. **Collective**.

        Raises:
            Exception: On a rank that failed, what it raised there.
            EngineError: On the others; names those that failed, the first cause first.
        """
        whole, told = self._mesh.whole, [self._own]
        if whole is not None and whole.size > 1:
            told = [None] * whole.size
            dist.all_gather_object(told, self._own, group=whole.group)
        causes = "; ".join(str(one) for one in sorted(one for one in told if one is not None))
        text = (
            f"{self._call}(): {causes}. All ranks have left this batch; weights are as before it, "
            "and the engine can go on with another"
        )
        if self._error is None or isinstance(self._error, StopIteration):  # no end of the data
            raise EngineError(text) from self._error
        self._error.add_note(text)
        raise self._error
