"""What stage 3 touches inside ``fully_shard``, under names of its own; nothing else may.

torch promises none of this. Each verb here says what is meant, the names that it is made of are
pinned by ``tests/engine/stage3/test_internals.py``, and a change in torch is mended in this file.

N ranks; S elements of a parameter's shard, padding included: the same on every rank.
"""

# ruff: noqa: SLF001 - the one file that may

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zerolab.errors import EngineError
from zerotrial.engine.comm.communicator import uses_nccl
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
else:  # before torch 2.9 there is no such interface
    AllGather = getattr(_fsdp_api, "AllGather", object)
    ReduceScatter = getattr(_fsdp_api, "ReduceScatter", object)

__all__ = [
    "AllGather",
    "ReduceScatter",
    "ShardedParameter",
    "UnitParameters",
    "also_whole",
    "cut_into_shards",
    "dress_class",
    "enter_forward",
    "keep_after_forward",
    "leave_forward",
    "local_part",
    "make_root",
    "outside_of_passes",
    "parameters_of",
    "reduce_unused_parameters",
    "reset_iteration",
    "set_all_gather",
    "set_divide_factor",
    "set_reduce_scatter",
    "sum_only",
    "undo",
]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Left on every module of a unit."""


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's part of a sharded tensor, without the cost of ``to_local()``."""
    return tensor._local_tensor


def dress_class(module: nn.Module) -> None:
    """Give the class that ``fully_shard`` has made the model's own name, by which libraries go.

    Its modules can be neither copied nor pickled; the error says what to do instead.
    """
    made: Any = type(module)
    own = made.__bases__[1]
    made.__name__, made.__qualname__ = own.__name__, own.__qualname__
    made.__deepcopy__ = made.__reduce_ex__ = _refuse_copy


def _refuse_copy(module: nn.Module, unused: Any) -> NoReturn:
    del unused
    raise EngineError(
        f"{type(module).__name__}: at stage 3 each rank has a part of the weights, so that the "
        "module cannot be copied or pickled; take engine.weights.full_state_dict() on every rank, "
        "use engine.save_16bit_model(directory), or close the engine first"
    )


def make_root(module: nn.Module) -> None:
    """Make a sharded model the root of its units, as its first forward would.

    Raises:
        AssertionError: As ``fully_shard`` words it, if the units do not go together.
    """
    _state_of(module)._lazy_init()


def reset_iteration(root: FSDPModule) -> None:
    """Return all units to their state between steps after a forward or backward that raised.

    Waits for collectives under way and discards their gradients.

    Args:
        root: The whole model.
    """
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    state = _state_of(cast("nn.Module", root))
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
        if unit._fsdp_param_group is not None:
            _reset_group(unit._fsdp_param_group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(owner: Any) -> None:
    """Return one unit's parameters to their state between steps."""
    owner.finalize_backward()  # waits for its gathering and its reductions
    owner._partial_reduce_output = None
    owner._training_state = TrainingState.IDLE
    owner._to_sharded()


def reduce_unused_parameters(unit: FSDPModule, *, enable: bool) -> None:
    """Choose whether trained parameters without a gradient take part in the reduction, as zeros.

    Without it, ranks that used different parameters of a unit would mix up their gradients.

    Args:
        unit: Before its first forward.
        enable: Whether they do.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.13
        unit.set_reduce_scatter_unused_params(enable)
        return
    parameters = parameters_of(unit)
    if enable and parameters is not None:
        parameters.before_reduction(parameters.fill_missing_gradients)


def set_all_gather(unit: FSDPModule, gather: AllGather) -> None:
    """Gather a unit's parameters by ``gather``."""
    if hasattr(unit, "set_custom_all_gather"):  # torch 2.9
        unit.set_custom_all_gather(gather)
        return
    _Collectives.of(unit).gather = gather


def set_reduce_scatter(unit: FSDPModule, reduce_scatter: ReduceScatter) -> None:
    """Reduce a unit's gradients by ``reduce_scatter``, which also divides them."""
    if hasattr(unit, "set_custom_reduce_scatter"):  # torch 2.9
        unit.set_custom_reduce_scatter(reduce_scatter)
        sum_only(unit)
        set_divide_factor(unit, 1.0)
        return
    _Collectives.of(unit).reduce_scatter = reduce_scatter


def keep_after_forward(unit: FSDPModule) -> None:
    """Keep a unit's parameters gathered from forward to backward."""
    if hasattr(unit, "set_reshard_after_forward"):  # torch 2.8
        unit.set_reshard_after_forward(False, recurse=False)
        return
    parameters = parameters_of(unit)
    if parameters is not None:
        parameters.frees_after_forward = None


def sum_only(unit: FSDPModule) -> None:
    """Reduce by sums: only NCCL can compute a mean."""
    if hasattr(unit, "set_force_sum_reduction_for_comms"):  # torch 2.9
        unit.set_force_sum_reduction_for_comms(True)


def set_divide_factor(unit: FSDPModule, factor: float) -> None:
    """Divide the sum of the ranks' gradients by ``factor`` instead of the number of ranks."""
    if hasattr(unit, "set_gradient_divide_factor"):  # torch 2.8
        unit.set_gradient_divide_factor(factor)
        return
    _Collectives.of(unit).factor = factor


class _Collectives:
    """Collectives of one unit under a torch whose ``fully_shard`` cannot be given any.

    That ``fully_shard`` calls ``torch.distributed`` by the name ``dist`` of one of its modules. The
    name is replaced by :class:`_Dispatcher`, which calls the collectives of the unit that gathers
    or reduces at the moment.
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
        """Return those of a unit; made by the first call."""
        owner = _state_of(cast("nn.Module", unit))._fsdp_param_group
        if owner is None:  # it has no parameters, and calls none
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
        """Whether the ranks' gradients are summed, and divided by a factor of ours."""
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
            lent = current.reduce_scatter.allocate(
                (input.numel(),), dtype=input.dtype, device=input.device
            )
            lent.copy_(input)
            current.reduce_scatter(output, lent, group, op)
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


def _divide_factors(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Have gradients that a unit's collective divides not divided before and after it as well."""

    def factors(*args: Any, **kwargs: Any) -> Any:
        current = _Collectives.current
        return (None, None) if current is not None and current.sums else shipped(*args, **kwargs)

    return factors


def _keep_moved_shard(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Have a shard stay where :meth:`ShardedParameter.move_shard` put it, as newer versions do."""

    def reset_sharded_param(member: Any) -> None:
        place, shard = member._module_info, member._sharded_param_data
        sharded = member.sharded_param
        memory = shard.untyped_storage().data_ptr()
        if (
            getattr(place.module, place.param_name) is sharded
            and memory > 0
            and memory == sharded._local_tensor.untyped_storage().data_ptr()
            and (shard.is_pinned() or not member.pin_memory)
        ):
            member._sharding_spec = sharded._spec
            return
        shipped(member)

    return reset_sharded_param


def _ignore_frozen_dtypes(shipped: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the types of a unit's trained parameters only, as newer versions do."""

    def init_dtypes(owner: Any) -> None:
        members = owner.fsdp_params
        for member in members:
            member.init_dtype_attrs(owner.mp_policy)
        owner.fsdp_params = [m for m in members if m.sharded_param.requires_grad] or members[:1]
        try:
            shipped(owner)
        finally:
            owner.fsdp_params = members

    return init_dtypes


def _patch_older_torch() -> None:
    """Give an older ``fully_shard`` what stage 3 needs; what it has already is left alone."""
    collectives: Any = _fsdp_collectives
    parameter: Any = FSDPParam
    group: Any = FSDPParamGroup
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):  # before torch 2.9
        collectives.dist = _Dispatcher()
        collectives._get_gradient_divide_factors = _divide_factors(
            collectives._get_gradient_divide_factors
        )
    # The names of local variables tell what a function does, better than a version would.
    if "same_local_tensor" not in parameter.reset_sharded_param.__code__.co_varnames:
        parameter.reset_sharded_param = _keep_moved_shard(parameter.reset_sharded_param)
    if "trainable_params" not in group._init_mp_dtypes.__code__.co_varnames:
        group._init_mp_dtypes = _ignore_frozen_dtypes(group._init_mp_dtypes)


_patch_older_torch()


def outside_of_passes(unit: FSDPModule) -> bool:
    """Whether neither a forward of the unit's module is under way nor a backward."""
    return bool(_state_of(cast("nn.Module", unit))._training_state == TrainingState.IDLE)


def enter_forward(unit: FSDPModule) -> None:
    """Gather a unit as though its module's forward began."""
    module = cast("nn.Module", unit)
    _state_of(module)._pre_forward(module, (), {})


def leave_forward(unit: FSDPModule, output: Any) -> Any:
    """End what :func:`enter_forward` began; a backward from the output reduces the unit.

    Args:
        unit: As there.
        output: What was computed.

    Returns:
        The output, to be used in its place.
    """
    module = cast("nn.Module", unit)
    return _state_of(module)._post_forward(module, (), output)


def parameters_of(unit: FSDPModule) -> UnitParameters | None:
    """Find what a unit gathers and reduces together; None if it has no parameters."""
    owner = _state_of(cast("nn.Module", unit))._fsdp_param_group
    return None if owner is None else UnitParameters(owner)


def _state_of(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


class ShardedParameter:
    """A parameter of a unit.

    Args:
        member: As ``fully_shard`` keeps it.
    """

    def __init__(self, member: Any) -> None:
        self._member = member

    @property
    def sharded(self) -> DTensor:
        """The parameter between steps; its ``grad`` is sharded alike."""
        return cast("DTensor", self._member.sharded_param)

    @property
    def own_dtype(self) -> torch.dtype:
        """Of the shard."""
        return cast("torch.dtype", self._member.orig_dtype)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of the gathered parameter."""
        return cast("torch.dtype", self._member.param_dtype or self._member.orig_dtype)

    @property
    def shard(self) -> Tensor:
        """This rank's part, (S,)."""
        return cast("Tensor", self._member._sharded_param_data)

    def move_shard(self, memory: Tensor) -> None:
        """Let the shard lie elsewhere from now on.

        ``fully_shard`` reads it through two attributes, and leaves them alone as long as both are
        views of one storage.

        Args:
            memory: (S,), of the shard's type.
        """
        local = self.sharded._local_tensor
        self._member._sharded_param_data = memory
        self.sharded._local_tensor = memory[: local.numel()].view(local.shape)

    def write_full(self, value: Tensor) -> None:
        """Write this rank's rows of a full tensor to the shard."""
        mesh = self.sharded.device_mesh
        rows = -(-value.shape[0] // mesh.size())
        start = min(rows * mesh.get_local_rank(), value.shape[0])
        local = value[start : start + rows]
        self.shard[: local.numel()].copy_(local.reshape(-1))

    def zeros(self) -> Tensor:
        """A whole gradient of nothing."""
        return torch.zeros(self.sharded.shape, dtype=self.forward_dtype)

    def gathered_once(self) -> Iterator[Tensor]:
        """The gathered parameter, the same at all times, if it has ever been gathered."""
        if hasattr(self._member, "_unsharded_param"):
            yield self._member._unsharded_param

    def forget_gradients(self) -> None:
        """Forget what a torn backward left; ``reset_iter_state()`` does not."""
        self._member.unsharded_accumulated_grad = None
        if hasattr(self._member, "_unsharded_param"):
            set_raw_gradient(self._member.unsharded_param, None)

    def give_back(self, whole: nn.Parameter) -> None:
        """Put a plain parameter into its modules, where the sharded one stood."""
        self._member._post_load_hook_handle.remove()
        self._member._setattr_on_modules(whole)


class UnitParameters:
    """The parameters that a unit gathers and reduces together.

    Args:
        owner: As ``fully_shard`` keeps them.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    def members(self) -> list[ShardedParameter]:
        """One by one; gradients come in this order."""
        return [ShardedParameter(member) for member in self._owner.fsdp_params]

    @property
    def trained(self) -> list[ShardedParameter]:
        """Those of the members that are to get a gradient."""
        return [member for member in self.members if member.sharded.requires_grad]

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Those that make up the unit."""
        return cast("Sequence[nn.Module]", self._owner.modules)

    @property
    def gathered(self) -> bool:
        """Whether modules have whole parameters now."""
        return bool(self._owner.is_unsharded)

    @property
    def frees_after_forward(self) -> Any:
        """Where and whether they are freed after a forward; opaque, to be put back."""
        return self._owner.post_forward_mesh_info

    @frees_after_forward.setter
    def frees_after_forward(self, value: Any) -> None:
        self._owner.post_forward_mesh_info = value

    def stay_gathered(self, *, stay: bool) -> None:
        """Keep modules' parameters gathered even in ``state_dict`` and ``load_state_dict``."""
        changes = [(self._owner, "_to_sharded")]
        changes += [(member, "reset_sharded_param") for member in self._owner.fsdp_params]
        for changed, name in changes:
            if stay:
                setattr(changed, name, _do_nothing)
            else:
                vars(changed).pop(name, None)

    @property
    def has_gradients(self) -> bool:
        """Whether backward has made any that is not reduced."""
        wholes = (getattr(member, "_unsharded_param", None) for member in self._owner.fsdp_params)
        return any(w is not None and get_raw_gradient(w) is not None for w in wholes)

    def fill_missing_gradients(self) -> None:
        """Give gathered parameters that backward has not reached a gradient of zeros."""
        for member in self._owner.fsdp_params if self._owner.reduce_grads else ():
            whole = getattr(member, "_unsharded_param", None)
            if (
                whole is not None
                and whole.requires_grad
                and get_raw_gradient(whole) is None
                and member.unsharded_accumulated_grad is None
            ):
                set_raw_gradient(whole, torch.zeros_like(whole))

    def reduce_rest(self) -> None:
        """Reduce what backward has made after it had passed the unit. **Collective**, if any."""
        if self.has_gradients:
            self._owner.post_backward()
            self._owner.finalize_backward()

    def reorder(self, members: Sequence[ShardedParameter]) -> None:
        """Have gradients come in another order; before the first forward."""
        self._owner.fsdp_params[:] = [member._member for member in members]

    def before_reduction(self, call: Callable[[], None]) -> None:
        """Have ``call`` run whenever backward has passed the unit, before it is reduced."""
        reduce = self._owner.post_backward

        def post_backward(*unused: Any) -> None:
            call()
            reduce(*unused)

        self._owner.post_backward = post_backward

    def after_reduction(self, call: Callable[[], None]) -> None:
        """Have ``call`` run whenever backward has passed the unit, after it is reduced."""
        reduce = self._owner.post_backward

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            call()

        self._owner.post_backward = post_backward

    def after_gather(self, call: Callable[[Iterator[tuple[Tensor, Tensor]]], None]) -> None:
        """Have ``call`` run whenever modules get the gathered parameters.

        Args:
            call: Gets each of the :attr:`trained` members, sharded and gathered.
        """
        owner, trained = self._owner, [member._member for member in self.trained]
        wait = owner.wait_for_unshard

        def wait_for_unshard() -> None:
            wait()
            if owner.is_unsharded:
                call((member.sharded_param, member._unsharded_param) for member in trained)

        if trained:
            owner.wait_for_unshard = wait_for_unshard

    def around_gather(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Have calls run before the unit is gathered, and when its shards have been read.

        They are read when gathering starts, or, by a rank that is alone, when it is waited for.
        """
        owner = self._owner
        gather, wait = owner.unshard, owner.wait_for_unshard

        def unshard(async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's interface
            before()
            gather(async_op)

        def wait_for_unshard() -> None:
            wait()
            after()

        owner.unshard = unshard
        owner.wait_for_unshard = wait_for_unshard

    def reduce_with(
        self, reduce: Callable[[list[Tensor | None]], None], wanted: Callable[[], bool]
    ) -> None:
        """Have gradients given to ``reduce``, for good; their shards get none.

        ``fully_shard`` has its group add them up over the ranks and hangs a sharded tensor on each
        parameter. Only the switching between sharded and gathered parameters is left.

        Args:
            reduce: Called when backward has passed the unit, or at its end where it did not come
                there; gets the gradients of the :attr:`trained` members, None for those without
                one, and must not keep them.
            wanted: Asked each time; if not, all goes as ``fully_shard`` does it.
        """
        owner, trained = self._owner, [member._member for member in self.trained]
        as_shipped = owner.post_backward

        def post_backward(*unused: Any) -> None:
            if not wanted():
                as_shipped(*unused)
                return
            owner._training_state = TrainingState.POST_BACKWARD
            gathered = [hasattr(member, "_unsharded_param") for member in trained]
            found = [_taken_gradient(member) for member in trained] if any(gathered) else []
            if owner.reshard_after_backward:
                owner.reshard()
            if found:
                reduce(found)

        owner.post_backward = post_backward

    def read_in_place(
        self, wholes: Sequence[Tensor], wanted: Callable[[], None], counted: Callable[[], None]
    ) -> None:
        """Make gathered parameters views of memory that has them whole at all times, for good.

        ``fully_shard`` asks its group to gather, waits, switches the modules between the sharded
        and the gathered parameters, and frees the latter. Only the switching is left.

        Args:
            wholes: Where each parameter is whole, (N * S,), in the order of :attr:`members`.
            wanted: Called whenever the unit is wanted whole.
            counted: Called when it would have been gathered.
        """
        owner = self._owner
        there = AllGatherResult(wholes[0], None, None, [], [], [])
        for parameter, whole in zip(owner.fsdp_params, wholes, strict=True):
            parameter.all_gather_outputs = [whole]
            parameter.free_unsharded_param = _do_nothing

        def unshard(async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's interface
            wanted()
            pending = owner._all_gather_result is not None
            kept = not owner.unshard_in_backward and (
                owner._training_state == TrainingState.PRE_BACKWARD
            )
            if not (pending or owner.is_unsharded or kept):
                counted()
                owner._all_gather_result = there

        def wait_for_unshard() -> None:
            if owner._all_gather_result is None:
                return
            owner._all_gather_result = None
            for parameter in owner.fsdp_params:
                parameter.init_unsharded_param()
            owner._to_unsharded()

        owner.unshard = unshard
        owner.wait_for_unshard = wait_for_unshard

    def _remove_hooks(self) -> None:
        saving = self._owner._module_to_pre_save_state_dict_hook_handle
        loading = self._owner._module_to_pre_load_state_dict_hook_handle
        for handles in (saving, loading):
            for handle in handles.values():
                handle.remove()
            handles.clear()


def undo(unit: FSDPModule, wholes: Sequence[nn.Parameter]) -> None:
    """Make a unit the plain module again that it was before ``fully_shard``.

    Args:
        unit: Not gathered now.
        wholes: Plain parameters in the order of :attr:`UnitParameters.members`.
    """
    module = cast("nn.Module", unit)
    state = _state_of(module)
    parameters = parameters_of(unit)
    if parameters is not None:
        for member, whole in zip(parameters.members, wholes, strict=True):
            member.give_back(whole)
        parameters._remove_hooks()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    _composable_state._module_state_mapping.pop(module, None)
    vars(module).pop(STATE_KEY, None)
    vars(module).pop(REGISTRY_KEY, None)
    for part in module.modules():
        for mark in _MARKS:
            vars(part).pop(mark, None)
    module.__class__ = type(module).__bases__[1]  # of a class made of FSDPModule and its own


@contextmanager
def also_whole(sharded: DTensor, whole: Tensor) -> Iterator[None]:
    """Have a sharded parameter be the gathered one, in its memory, within a ``with`` block.

    It is a plain tensor there, of the type of ``whole``: what is computed from it is plain, too, so
    that a script can keep it, or save it. What ``sharded.data`` is set to ends up in ``whole``.

    Args:
        sharded: Sharded.
        whole: Gathered until the block has ended.
    """
    before = sharded._local_tensor, sharded._spec
    mesh = sharded.device_mesh
    memory = whole.detach()
    plain = nn.Parameter(memory, requires_grad=sharded.requires_grad)
    torch._C._swap_tensor_impl(sharded, plain)
    sharded._local_tensor = memory
    sharded._spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=before[1].tensor_meta)
    try:
        yield
    finally:
        torch._C._swap_tensor_impl(sharded, plain)
        sharded._local_tensor, sharded._spec = before
        if plain.data_ptr() != memory.data_ptr():
            memory.copy_(plain.detach())


def cut_into_shards(gradients: Sequence[Tensor], memory: Tensor, ranks: int) -> None:
    """Lay whole gradients into memory, rank by rank, as their parameters are cut.

    Args:
        gradients: Of a unit, each cut along its first dimension.
        memory: (N * S,), filled; padding becomes zero.
        ranks: N.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=ranks, out=memory.view(ranks, -1))


def _taken_gradient(member: Any) -> Tensor | None:
    """The whole gradient of a parameter that was gathered, which forgets it."""
    if not hasattr(member, "_unsharded_param"):
        return None
    whole = member._unsharded_param
    gradient = get_raw_gradient(whole)
    set_raw_gradient(whole, None)
    return cast("Tensor | None", gradient)


def _do_nothing() -> None:
    return
