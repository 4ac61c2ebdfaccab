"""Micro-batches of one optimizer step: read on the ranks that need them, checked on all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zerolab.errors import EngineError
from zerotrial.engine.mesh import Axis, Mesh
from zerotrial.extensions.pipeline.failure import Failures

__all__ = ["MicroBatches", "draw"]

_FINE, _ENDED, _FAILED = 0, 1, 2


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches that this rank needs."""

    inputs: list[tuple[Any, ...]]
    """Inputs of the first layer, on the first stage."""

    labels: list[Any]
    """Labels, on the last stage."""

    kind: int
    """Key that is equal for micro-batches of the same shapes and trained weights."""


def draw(
    data: Iterator[Any] | None,
    count: int,
    mesh: Mesh,
    device: torch.device,
    prepare: Callable[[Any], Any],
    *,
    failures: Failures,
    state: Any = None,
    ragged: bool = False,
) -> MicroBatches:
    """Read micro-batches from an iterator on the ranks that need them. **Collective**.

    Args:
        data: Iterator of ``(inputs, labels)`` for the first and the last stage.
        count: Number of micro-batches.
        mesh: The engine's mesh.
        device: Device of this rank.
        prepare: Moves and casts inputs.
        failures: Failures of the batch.
        state: State of this rank's layers that may affect their outputs.
        ragged: Whether micro-batches may differ in shape.

    Raises:
        StopIteration: On all ranks, if the data ends before ``count`` on any rank.
        EngineError: On all ranks, if data is no pair or differs in shape.
        Exception: On all ranks, if the iterator raises; as an EngineError on other ranks.
    """
    inputs: list[tuple[Any, ...]] = []
    labels: list[Any] = []
    status, kind, index = _FINE, 0, 0
    first, last = mesh.pipe.rank == 0, mesh.pipe.rank == mesh.pipe.size - 1
    if not (first or last):
        kind = 0 if ragged else _digest(state)
    else:
        try:
            for index in range(count):
                batch_inputs, batch_labels = _pair(_next(data, index))
                if first:
                    parts = (
                        batch_inputs if isinstance(batch_inputs, tuple | list) else (batch_inputs,)
                    )
                    inputs.append(tuple(prepare(part) for part in parts))
                if last:
                    labels.append(tree_map_only(Tensor, lambda t: t.to(device), batch_labels))
            kind = 0 if ragged else _digest((_shape_of(inputs), state))
        except StopIteration:
            status = _ENDED
        except Exception as error:  # noqa: BLE001 - raised below on all ranks together
            status = _FAILED
            failures.record(error, index)
    if mesh.all_ranks is not None and mesh.all_ranks.size > 1:
        status, kind = _agree(status, kind, mesh.all_ranks, mesh, device)
    if status == _FAILED:
        failures.raise_everywhere()
    if status == _ENDED:
        raise StopIteration
    return MicroBatches(inputs, labels, kind)


def _next(data: Iterator[Any] | None, index: int) -> Any:
    if data is None:
        msg = "train_batch(), eval_batch(): the first and the last pipeline stage need data_iter, "
        raise EngineError(f"{msg}got None; pass it, or training_data to initialize()")
    try:
        return next(data)
    except StopIteration:
        raise
    except TypeError as error:
        msg = f"data_iter: must be an iterator, got {type(data).__name__}; pass iter(it)"
        raise EngineError(msg) if index == 0 else error from error


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{type(batch).__name__}"
    if isinstance(batch, tuple | list):
        kind += f" of {len(batch)}"
    msg = f"data_iter: must yield pairs of inputs and labels for a PipelineModule, got a {kind}"
    raise EngineError(msg)


def _shape_of(inputs: list[tuple[Any, ...]]) -> Any:
    kinds = [
        [(tuple(p.shape), str(p.dtype)) if isinstance(p, Tensor) else type(p) for p in parts]
        for parts in inputs
    ]
    for index, kind in enumerate(kinds):
        if kind != kinds[0]:
            msg = "data_iter: the micro-batches of one train_batch() must all have one shape, got "
            raise EngineError(
                f"{msg}{kinds[0]} and {kind} (micro-batch {index}); drop the last one that is not "
                "full, or pad it"
            )
    return kinds[:1]


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _agree(
    status: int, kind: int, ranks: Axis, mesh: Mesh, device: torch.device
) -> tuple[int, int]:
    """Return the worst status of all ranks, and a common kind for the stages of this pipeline."""
    local = torch.tensor([status, kind], device=device)
    gathered = [torch.empty_like(local) for _ in range(ranks.size)]
    dist.all_gather(gathered, local, group=ranks.group)
    values = torch.stack(gathered).tolist()
    replicas = mesh.data.size * mesh.tensor.size
    kinds = [row[1] for row in values[ranks.rank % replicas :: replicas]]
    return max(row[0] for row in values), _digest(kinds)
