"""ZeRO stage 3 on torch before 2.13: adds what its ``fully_shard`` lacks.

docs/contribute/torch_versions.md says what differs there.
"""

# ruff: noqa: SLF001 - like zerotrial.engine.stage3.internals

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from zerotrial.engine.comm.communicator import uses_nccl
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["add_missing_methods"]


def add_missing_methods() -> None:
    """Add methods of torch 2.13's ``FSDPModule``, and what stage 3 needs besides."""
    collectives: Any = _fsdp_collectives
    parameter: Any = FSDPParam
    group: Any = FSDPParamGroup
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):  # before torch 2.9
        collectives.dist = _Dispatcher()
        collectives._get_gradient_divide_factors = _skip_division(
            collectives._get_gradient_divide_factors
        )
    # Local variable names identify an implementation more reliably than a version number.
    if "same_local_tensor" not in parameter.reset_sharded_param.__code__.co_varnames:
        parameter.reset_sharded_param = _keep_moved_shard(parameter.reset_sharded_param)
    if "trainable_params" not in group._init_mp_dtypes.__code__.co_varnames:
        group._init_mp_dtypes = _ignore_frozen_dtypes(group._init_mp_dtypes)
    for method in (
        reset_iter_state,  # torch 2.13
        set_reduce_scatter_unused_params,
        set_custom_all_gather,  # torch 2.9
        set_custom_reduce_scatter,
        set_force_sum_reduction_for_comms,
        set_gradient_divide_factor,  # torch 2.8
        set_reshard_after_forward,
    ):
        if not hasattr(FSDPModule, method.__name__):
            setattr(FSDPModule, method.__name__, method)


def reset_iter_state(root: FSDPModule) -> None:
    """Reset all units to the idle state after a forward or backward that raised.

    Waits for pending collectives and discards their gradients.
    """
    state = _state_of(root)
    stream = state._device_handle.current_stream()
    shared = state._comm_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        pending = getattr(shared, name)
        if pending is not None and pending.event is not None:
            stream.wait_event(pending.event)
        setattr(shared, name, None)
    shared.post_forward_order.clear()
    for unit in state._state_ctx.all_states:
        if hasattr(unit, "_modules_to_run_forward"):
            unit._modules_to_run_forward.clear()
        unit._training_state = TrainingState.IDLE
        owner = unit._fsdp_param_group
        if owner is not None:
            owner.finalize_backward()  # waits for the all-gather and the reductions
            owner._partial_reduce_output = None
            owner._training_state = TrainingState.IDLE
            owner._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def set_reduce_scatter_unused_params(unit: FSDPModule, enable: bool) -> None:  # noqa: FBT001 - torch's interface
    """Choose whether trained parameters without a gradient are reduced as zeros."""
    owner = _group_of(unit)
    if not enable or owner is None:
        return
    reduce = owner.post_backward

    def post_backward(*unused: Any) -> None:
        for member in owner.fsdp_params if owner.reduce_grads else ():
            gathered = getattr(member, "_unsharded_param", None)
            if (
                gathered is not None
                and gathered.requires_grad
                and get_raw_gradient(gathered) is None
                and member.unsharded_accumulated_grad is None
            ):
                set_raw_gradient(gathered, torch.zeros_like(gathered))
        reduce(*unused)

    owner.post_backward = post_backward


def set_custom_all_gather(unit: FSDPModule, gather: AllGather) -> None:
    """Gather a unit's parameters by ``gather``."""
    _Collectives.of(unit).gather = gather


def set_custom_reduce_scatter(unit: FSDPModule, reduce_scatter: ReduceScatter) -> None:
    """Reduce a unit's gradients by ``reduce_scatter``, which also scales them."""
    _Collectives.of(unit).reduce_scatter = reduce_scatter


def set_force_sum_reduction_for_comms(unit: FSDPModule, enable: bool) -> None:  # noqa: FBT001 - torch's interface
    """Do nothing: :class:`_Dispatcher` sums wherever a backend has no mean."""


def set_gradient_divide_factor(unit: FSDPModule, factor: float) -> None:
    """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks."""
    _Collectives.of(unit).factor = factor


def set_reshard_after_forward(
    unit: FSDPModule,
    reshard_after_forward: bool,  # noqa: FBT001 - torch's interface
    *,
    recurse: bool,
) -> None:
    """Keep a unit's parameters gathered from forward to backward."""
    assert not reshard_after_forward
    assert not recurse
    owner = _group_of(unit)
    if owner is not None:
        owner.post_forward_mesh_info = None


def _state_of(unit: FSDPModule) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _group_of(unit: FSDPModule) -> Any:
    return _state_of(unit)._fsdp_param_group


class _Collectives:
    """Collectives of one unit under a torch version without custom collectives.

    Its ``fully_shard`` calls ``torch.distributed`` by the global name ``dist`` of a module. That
    name is bound to a :class:`_Dispatcher`, which calls the collectives of the unit that is being
    gathered or reduced.
    """

    current: _Collectives | None = None

    def __init__(self, owner: Any) -> None:
        self.gather: AllGather | None = None
        self.reduce_scatter: ReduceScatter | None = None
        self.factor: float | None = None
        for name in ("unshard", "post_backward"):
            setattr(owner, name, self._within(getattr(owner, name)))

    @staticmethod
    def of(unit: FSDPModule) -> _Collectives:
        """Return a unit's collectives, created by the first call."""
        owner = _group_of(unit)
        if owner is None:  # no parameters, no collectives
            return _Collectives(SimpleNamespace(unshard=None, post_backward=None))
        if not hasattr(owner, "zerolab_collectives"):
            owner.zerolab_collectives = _Collectives(owner)
        return cast("_Collectives", owner.zerolab_collectives)

    def _within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, _Collectives.current = _Collectives.current, self
            try:
                return call(*args, **kwargs)
            finally:
                _Collectives.current = before

        return wrapped

    @property
    def sums(self) -> bool:
        """Whether gradients are summed and then scaled by our own factor."""
        return self.reduce_scatter is not None or self.factor is not None


class _Dispatcher:
    """``torch.distributed``, with the collectives of :class:`_Collectives` and a mean for gloo."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_gather_into_tensor(
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 - torch's interface
    ) -> Any:
        """Gather by the unit's collective, else by the group's backend."""
        current = _Collectives.current
        if current is not None and current.gather is not None:
            return current.gather(output_tensor, input_tensor, group, async_op)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    @staticmethod
    def reduce_scatter_tensor(output: Tensor, input: Tensor, group: Any, op: Any) -> None:  # noqa: A002 - torch's interface
        """Reduce by the unit's collective, else by the group's backend."""
        current, size = _Collectives.current, dist.get_world_size(group)
        factor = None if current is None else current.factor
        if current is not None and current.reduce_scatter is not None:
            buffer = current.reduce_scatter.allocate(
                (input.numel(),), dtype=input.dtype, device=input.device
            )
            buffer.copy_(input)
            current.reduce_scatter(output, buffer, group, op)
        elif size == 1:
            output.copy_(input).div_(factor or 1.0)
        elif factor is not None or (op == dist.ReduceOp.AVG and not uses_nccl(group, input.device)):
            dist.reduce_scatter_tensor(output, input, dist.ReduceOp.SUM, group)
            output.div_(factor or size)
        else:
            dist.reduce_scatter_tensor(output, input, op, group)

    @staticmethod
    def all_reduce(tensor: Tensor, group: Any, op: Any) -> None:
        """Reduce over replicas."""
        current = _Collectives.current
        if current is not None and current.sums:
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
        elif op == dist.ReduceOp.AVG and not uses_nccl(group, tensor.device):
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group)
            tensor.div_(dist.get_world_size(group))
        else:
            dist.all_reduce(tensor, op, group)


def _skip_division(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip the division of gradients that a unit's collective already divides."""

    def factors(*args: Any, **kwargs: Any) -> Any:
        current = _Collectives.current
        return (None, None) if current is not None and current.sums else original(*args, **kwargs)

    return factors


def _keep_moved_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a shard where :meth:`ShardedParameter.move_shard` put it, as newer versions do."""

    def reset_sharded_param(member: Any) -> None:
        module_info, shard = member._module_info, member._sharded_param_data
        sharded = member.sharded_param
        memory = shard.untyped_storage().data_ptr()
        if (
            getattr(module_info.module, module_info.param_name) is sharded
            and memory > 0
            and memory == sharded._local_tensor.untyped_storage().data_ptr()
            and (shard.is_pinned() or not member.pin_memory)
        ):
            member._sharding_spec = sharded._spec
            return
        original(member)

    return reset_sharded_param


def _ignore_frozen_dtypes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Require one type of a unit's trained parameters only, as newer versions do."""

    def init_dtypes(owner: Any) -> None:
        members = owner.fsdp_params
        for member in members:
            member.init_dtype_attrs(owner.mp_policy)
        owner.fsdp_params = [m for m in members if m.sharded_param.requires_grad] or members[:1]
        try:
            original(owner)
        finally:
            owner.fsdp_params = members

    return init_dtypes
