"""Stage 3: parameters, gradients and optimizer states are sharded; blocks are gathered to compute.

``fully_shard`` gathers a unit before its forward and again before its backward, and
reduce-scatters its gradients after; see :mod:`zerotrial.engine.fsdp_wrap` for the units. What is
ours: the global norm, scaling and clipping, the optimizer on this rank's shards through the same
:class:`~zerotrial.engine.parts.Updater` as at the other stages, and the pieces of a checkpoint.

::

    parameter   [ row 0 | row 1 | row 2 | row 3 | row 4 ]      gathered for forward and backward
    rank 0      [ row 0 | row 1 | row 2 ]                      fp32, updated in place
    rank 1                              [ row 3 | row 4 ]

N is the number of data-parallel ranks, S the elements of a parameter that a rank keeps.

References:
    Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.3.
    Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerolab.errors import TrialError
from zerotrial.engine.parts import Piece

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.parts import StageInputs, Updater


@dataclass(frozen=True)
class Shard:
    """One trainable parameter, as this rank sees it.

    Attributes:
        name: In ``module.named_parameters()``; of tied parameters the first.
        parameter: The sharded parameter; its ``grad`` is sharded alike.
        group_index: Of the optimizer group that it belongs to.
        start: First element of the flattened parameter that this rank keeps.
        stop: One after the last; equal to ``start`` on ranks that have no row.
    """

    name: str
    parameter: DTensor
    group_index: int
    start: int
    stop: int

    @property
    def master(self) -> Tensor:
        """This rank's elements, fp32, ``(S,)``; a view."""
        return self.parameter._local_tensor.detach().view(-1)  # noqa: SLF001 - to_local() costs more

    @property
    def gradient(self) -> Tensor | None:
        """Averaged over the ranks, summed over micro-batches, fp32, ``(S,)``; a view."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        return cast("DTensor", gradient)._local_tensor.view(-1)  # noqa: SLF001 - as above


class Stage3:
    """The :class:`~zerotrial.engine.parts.Stage` on ``fully_shard``.

    Args:
        inputs: What every stage is built from; the module is sharded already.
        units: In the order of :func:`~zerotrial.engine.fsdp_wrap.shard_module`.
        shards: Of :func:`find_shards`.
        updater: Made on the masters of all shards that are not empty, in their order.
    """

    def __init__(
        self,
        inputs: StageInputs,
        units: Sequence[FSDPModule],
        shards: Sequence[Shard],
        updater: Updater,
    ) -> None:
        self.optimizer = updater.optimizer
        self._units = units
        self._shards = shards
        self._owned = [shard for shard in shards if shard.start < shard.stop]
        self._updater = updater
        self._groups = [group for group in (inputs.group, inputs.model_group) if group is not None]
        self._device = inputs.device
        self._every_gradient = not inputs.config.zero_optimization.ignore_unused_parameters

    def before_backward(self, *, boundary: bool) -> None:
        """Do nothing: every micro-batch's gradients are reduce-scattered as they come."""

    def after_backward(self, *, boundary: bool) -> None:
        """Check for parameters without a gradient, where the config asks for it."""
        if not self._every_gradient:
            return
        missing = [shard.name for shard in self._shards if shard.parameter.grad is None]
        if missing:
            raise TrialError(
                f"parameters got no gradient: {', '.join(missing)}; use them in forward, freeze "
                "them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Return the norm; the averaging itself has happened in backward. **Collective**."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for shard in self._owned:
            if (gradient := shard.gradient) is not None:
                norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
                squares += norm.to(self._device).square()
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return math.sqrt(squares.item()) / loss_scale

    def apply(self, scale: float) -> None:
        """Update this rank's shards; the next gather publishes them. **Collective**."""
        for index, shard in enumerate(self._owned):
            gradient = shard.gradient
            if gradient is None:
                gradient = torch.zeros_like(shard.master)
            self._updater.step(index, gradient, scale, shard.master)
        self._updater.finish()
        self.drop_gradients()
        self._release()

    def drop_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        for shard in self._shards:
            shard.parameter.grad = None

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk this rank's ranges, one for each parameter of which it has a row."""
        for index, shard in enumerate(self._owned):
            with self._updater.states(index, write=write) as tensors:
                yield Piece(shard.name, shard.parameter.shape, shard.start, shard.stop, tensors)

    def scalars(self) -> dict[str, float]:
        """Optimizer scalars that are the same on all ranks."""
        return self._updater.scalars()

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore what :meth:`scalars` gave."""
        self._updater.set_scalars(scalars)

    def prepare_states(self) -> None:
        """Make the optimizer's states, so that a load can fill them."""
        self._updater.prepare_states()

    def weights_changed(self) -> None:
        """Publish loaded masters. **Collective**."""
        for index, shard in enumerate(self._owned):
            with self._updater.states(index, write=False) as tensors:
                if tensors["master"].data_ptr() != shard.master.data_ptr():
                    shard.master.copy_(tensors["master"])
        self._release()

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors by kind; the shards are the master weights."""
        gradients = [shard.gradient for shard in self._shards]
        updater = self._updater.held()
        return updater | {
            "master": [shard.master for shard in self._shards],
            "gradients": [gradient for gradient in gradients if gradient is not None],
        }

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter, whole, one after the other. **Collective**."""
        for shard in self._shards:
            whole = cast("DTensor", shard.parameter.detach()).full_tensor()
            yield shard.name, whole if dtype is None else whole.to(dtype)

    def close(self) -> None:
        """Give the updater's files and threads back."""
        self._release()
        self._updater.close()

    def _release(self) -> None:
        """Free gathered weights, which a forward without a backward leaves behind in the root."""
        for unit in self._units:
            unit.reshard()


def find_shards(inputs: StageInputs) -> list[Shard]:
    """Find this rank's ranges after the module was sharded.

    Args:
        inputs: Of the stage; ``groups`` hold the parameters from before, found again by name.

    Returns:
        One for each trainable parameter, in the order of the optimizer's groups.
    """
    now = dict(inputs.module.named_parameters())
    shards = []
    for index, group in enumerate(inputs.groups):
        for named in group.parameters:
            parameter = cast("DTensor", now[named.name])
            rows = -(-parameter.shape[0] // parameter.device_mesh.size())
            row = math.prod(parameter.shape[1:])
            start = min(rows * parameter.device_mesh.get_local_rank(), parameter.shape[0]) * row
            stop = start + parameter.to_local().numel()
            shards.append(Shard(named.name, parameter, index, start, stop))
    return shards
