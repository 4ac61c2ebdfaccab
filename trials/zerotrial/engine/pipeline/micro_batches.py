"""The micro-batches of one optimizer step: drawn where they are needed, agreed on by all stages."""

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
from zerotrial.engine.pipeline.failure import Failures

__all__ = ["MicroBatches", "draw"]

_FINE, _ENDED, _FAILED = 0, 1, 2


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches, as far as this rank needs them."""

    inputs: list[tuple[Any, ...]]
    """On the first stage: what the first layer gets."""

    labels: list[Any]
    """On the last stage."""

    kind: int
    """The same number for micro-batches of the same shapes that train the same weights."""


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
    """Take micro-batches from an iterator, on the ranks that read. **Collective** over the mesh.

    Args:
        data: Yields ``(inputs, labels)``; the first and the last stage read it.
        count: How many.
        mesh: Of the engine.
        device: Of this rank.
        prepare: Brings inputs to it.
        failures: Of the batch.
        state: Of this rank's layers: what they pass on may depend on it.
        ragged: Micro-batches may differ in shape.

    Raises:
        StopIteration: On all ranks, where the data ends before ``count`` on any.
        EngineError: On all ranks, where data is no pair or differs in shape.
        Exception: On all ranks, where the iterator raises; as an EngineError on the others.
    """
    inputs: list[tuple[Any, ...]] = []
    labels: list[Any] = []
    status, kind, index = _FINE, 0, 0
    first, last = mesh.pipe.rank == 0, mesh.pipe.rank == mesh.pipe.size - 1
    if not (first or last):
        kind = 0 if ragged else _number_of(state)
    else:
        try:
            for index in range(count):
                given, wanted = _pair(_next(data, index))
                if first:
                    parts = given if isinstance(given, tuple | list) else (given,)
                    inputs.append(tuple(prepare(part) for part in parts))
                if last:
                    labels.append(tree_map_only(Tensor, lambda t: t.to(device), wanted))
            kind = 0 if ragged else _number_of((_shape_of(inputs), state))
        except StopIteration:
            status = _ENDED
        except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know
            status = _FAILED
            failures.note(error, index)
    if mesh.whole is not None and mesh.whole.size > 1:
        status, kind = _agree(status, kind, mesh.whole, mesh, device)
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
    found = f"{type(batch).__name__}"
    if isinstance(batch, tuple | list):
        found += f" of {len(batch)}"
    msg = f"data_iter: must yield pairs of inputs and labels for a PipelineModule, got a {found}"
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


def _number_of(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "big")


def _agree(
    status: int, kind: int, whole: Axis, mesh: Mesh, device: torch.device
) -> tuple[int, int]:
    """Return the worst status of all ranks, and one kind for all stages of this pipeline."""
    own = torch.tensor([status, kind], device=device)
    found = [torch.empty_like(own) for _ in range(whole.size)]
    dist.all_gather(found, own, group=whole.group)
    values = torch.stack(found).tolist()
    replicas = mesh.data.size * mesh.tensor.size
    kinds = [one[1] for one in values[whole.rank % replicas :: replicas]]
    return max(one[0] for one in values), _number_of(kinds)
