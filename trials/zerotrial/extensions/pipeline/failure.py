"""Propagation of an exception on one rank of a batch to all ranks.

A schedule is a fixed order of sends and receives: if a rank left it, its neighbours would wait
until the timeout. So a rank whose layers or loss raise goes through the rest of the batch without
computing, and sends zeros instead of activations and gradients. At the end all ranks learn of the
failure together, and drop the batch.
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

_WRAPPER_TEXTS = "failed to run forward", "Failed to run stage backward"
"""Texts with which torch's stages wrap a layer's exception."""


@dataclass(frozen=True, order=True)
class _Failure:
    """Description of a failure for other ranks; sorted by order of possible causes."""

    micro_batch: int
    stage: int
    rank: int
    cause: str

    def __str__(self) -> str:
        location = f"rank {self.rank} (pipeline stage {self.stage}), micro-batch {self.micro_batch}"
        return f"{location}: {self.cause}"


class Failures:
    """Failures of one batch: the first exception of this rank, at the end those of all ranks.

    Args:
        mesh: The engine's mesh.
        call: Name of the engine's method, for errors.
        gathers: Whether layers gather their weights, as at ZeRO stage 3.
    """

    def __init__(self, mesh: Mesh, call: str, *, gathers: bool) -> None:
        self._mesh = mesh
        self._call = call
        self._raises_immediately = gathers or mesh.tensor.size > 1
        self._error: Exception | None = None
        self._micro_batch = 0

    def __bool__(self) -> bool:
        """Return whether this rank has failed."""
        return self._error is not None

    @contextmanager
    def catching(self, micro_batch: int) -> Iterator[None]:
        """Catch an exception of the block.

        Ranks that compute a layer together along the tensor axis, or gather its weights, wait for
        each other inside of it and would never reach the end of the batch. In that case the
        exception is raised at once.
        """
        try:
            yield
        except Exception as error:
            if self._raises_immediately:
                raise
            self.record(error, micro_batch)

    def record(self, error: Exception, micro_batch: int) -> None:
        """Record an exception, if it is the first."""
        if self._error is None:
            text = str(error)
            is_wrapped = type(error) is RuntimeError and any(
                marker in text for marker in _WRAPPER_TEXTS
            )
            inner = error.__cause__ if is_wrapped else None
            self._error = inner if isinstance(inner, Exception) else error
            self._micro_batch = micro_batch
            logger.error(
                "%s(): %s. All ranks raise at the end of this batch",
                self._call,
                self._local_failure,
            )

    @property
    def _local_failure(self) -> _Failure | None:
        if self._error is None:
            return None
        first = (str(self._error).strip().splitlines() or [""])[0]
        cause = f"{type(self._error).__name__}: {first}" if first else type(self._error).__name__
        rank = dist.get_rank() if dist.is_initialized() else 0
        return _Failure(self._micro_batch, self._mesh.pipe.rank, rank, cause)

    def raise_everywhere(self) -> None:
        """Raise on all ranks of the mesh, at least one of which has failed. **Collective**.

        Raises:
            Exception: On a failed rank, its own exception.
            EngineError: On other ranks; names the failed ranks, the first cause first.
        """
        ranks, descriptions = self._mesh.all_ranks, [self._local_failure]
        if ranks is not None and ranks.size > 1:
            descriptions = [None] * ranks.size
            dist.all_gather_object(descriptions, self._local_failure, group=ranks.group)
        causes = "; ".join(
            str(description)
            for description in sorted(
                description for description in descriptions if description is not None
            )
        )
        text = (
            f"{self._call}(): {causes}. All ranks have dropped this batch; weights are unchanged, "
            "and the engine can continue with the next batch"
        )
        if self._error is None or isinstance(self._error, StopIteration):  # no end of the data
            raise EngineError(text) from self._error
        self._error.add_note(text)
        raise self._error
