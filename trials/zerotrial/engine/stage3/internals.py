"""Access to internals of ``fully_shard``; no other module of the engine touches them.

torch guarantees none of these names. ``tests/engine/stage3/test_internals.py`` pins the names used
here, and changes in torch are followed in this file only. With torch before 2.13, importing this
module patches ``fully_shard`` for the whole process: see ``zerotrial.extensions.older_torch``.

N is the number of ranks, S the elements of a parameter's shard with padding, equal on every rank.
"""

# ruff: noqa: SLF001 - the only file that may use private names of torch

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from zerolab.errors import EngineError
from zerotrial.engine.module.gradient_access import get_raw_gradient, set_raw_gradient
from zerotrial.engine.protocols import ENGINE_PARTS

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
    "as_gathered",
    "copy_as_shards",
    "enter_forward",
    "leave_forward",
    "local_part",
    "make_root",
    "outside_of_passes",
    "parameters_of",
    "remove_fully_shard",
    "restore_class_name",
]

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes left on every module of a unit."""


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's part of a sharded tensor, without the cost of ``to_local()``."""
    return tensor._local_tensor


def restore_class_name(module: nn.Module) -> None:
    """Give the class made by ``fully_shard`` the model's own class name, which libraries look up.

    Its modules can be neither copied nor pickled; the error names the alternatives.
    """
    fsdp_class: Any = type(module)
    original_class = fsdp_class.__bases__[1]
    fsdp_class.__name__, fsdp_class.__qualname__ = (
        original_class.__name__,
        original_class.__qualname__,
    )
    fsdp_class.__deepcopy__ = fsdp_class.__reduce_ex__ = _refuse_copy


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
        AssertionError: If the units are incompatible; the message is that of ``fully_shard``.
    """
    _state_of(module)._lazy_init()


def outside_of_passes(unit: FSDPModule) -> bool:
    """Whether the unit is in neither a forward nor a backward pass."""
    return bool(_state_of(cast("nn.Module", unit))._training_state == TrainingState.IDLE)


def enter_forward(unit: FSDPModule) -> None:
    """Gather a unit as if the forward of its module began."""
    module = cast("nn.Module", unit)
    _state_of(module)._pre_forward(module, (), {})


def leave_forward(unit: FSDPModule, output: Any) -> Any:
    """End :func:`enter_forward`. A backward pass from the output reduces the unit.

    Args:
        unit: The unit passed there.
        output: The result of the call.

    Returns:
        The output to use instead.
    """
    module = cast("nn.Module", unit)
    return _state_of(module)._post_forward(module, (), output)


def parameters_of(unit: FSDPModule) -> UnitParameters | None:
    """Return the parameters that a unit gathers and reduces together; None if it has none."""
    owner = _state_of(cast("nn.Module", unit))._fsdp_param_group
    return None if owner is None else UnitParameters(owner)


def _state_of(module: nn.Module) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


class ShardedParameter:
    """One parameter of a unit.

    Args:
        member: ``FSDPParam`` object of ``fully_shard``.
    """

    def __init__(self, member: Any) -> None:
        self._member = member

    @property
    def sharded(self) -> DTensor:
        """The parameter between steps; its ``grad`` is sharded in the same way."""
        return cast("DTensor", self._member.sharded_param)

    @property
    def own_dtype(self) -> torch.dtype:
        """Type of the shard."""
        return cast("torch.dtype", self._member.orig_dtype)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Type of the gathered parameter."""
        return cast("torch.dtype", self._member.param_dtype or self._member.orig_dtype)

    @property
    def shard(self) -> Tensor:
        """This rank's part, (S,)."""
        return cast("Tensor", self._member._sharded_param_data)

    def move_shard(self, memory: Tensor) -> None:
        """Move the shard to other memory permanently.

        ``fully_shard`` reads the shard through two attributes. It leaves both alone as long as they
        are views of one storage.

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
        """Return a full gradient of zeros."""
        return torch.zeros(self.sharded.shape, dtype=self.forward_dtype, device=self.sharded.device)

    def gathered_if_any(self) -> Iterator[Tensor]:
        """Yield the gathered parameter, always the same object, if it has ever been gathered."""
        if hasattr(self._member, "_unsharded_param"):
            yield self._member._unsharded_param

    def forget_gradients(self) -> None:
        """Discard gradients of a backward that raised, which ``reset_iter_state()`` keeps."""
        self._member.unsharded_accumulated_grad = None
        if hasattr(self._member, "_unsharded_param"):
            set_raw_gradient(self._member.unsharded_param, None)

    def give_back(self, full: nn.Parameter) -> None:
        """Replace the sharded parameter by a plain one in its modules."""
        self._member._post_load_hook_handle.remove()
        self._member._setattr_on_modules(full)


class UnitParameters:
    """Parameters that a unit gathers and reduces together."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    @property
    def members(self) -> list[ShardedParameter]:
        """All parameters, in the order of their gradients."""
        return [ShardedParameter(member) for member in self._owner.fsdp_params]

    @property
    def trained(self) -> list[ShardedParameter]:
        """Members that require gradients."""
        return [member for member in self.members if member.sharded.requires_grad]

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Modules of the unit."""
        return cast("Sequence[nn.Module]", self._owner.modules)

    @property
    def gathered(self) -> bool:
        """Whether the modules currently have gathered parameters."""
        return bool(self._owner.is_unsharded)

    @property
    def post_forward_mesh(self) -> Any:
        """Opaque setting of whether and where parameters are freed after forward."""
        return self._owner.post_forward_mesh_info

    @post_forward_mesh.setter
    def post_forward_mesh(self, value: Any) -> None:
        self._owner.post_forward_mesh_info = value

    def stay_gathered(self, *, stay: bool) -> None:
        """Keep parameters gathered even in ``state_dict`` and ``load_state_dict``."""
        changes = [(self._owner, "_to_sharded")]
        changes += [(member, "reset_sharded_param") for member in self._owner.fsdp_params]
        for changed, name in changes:
            if stay:
                setattr(changed, name, _do_nothing)
            else:
                vars(changed).pop(name, None)

    @property
    def has_gradients(self) -> bool:
        """Whether backward has computed gradients that are not reduced yet."""
        wholes = (getattr(member, "_unsharded_param", None) for member in self._owner.fsdp_params)
        return any(w is not None and get_raw_gradient(w) is not None for w in wholes)

    def reduce_remaining(self) -> None:
        """Reduce gradients computed after backward passed the unit. **Collective** if any."""
        if self.has_gradients:
            self._owner.post_backward()
            self._owner.finalize_backward()

    def reorder(self, members: Sequence[ShardedParameter]) -> None:
        """Change the order of gradients, before the first forward."""
        self._owner.fsdp_params[:] = [member._member for member in members]

    def before_reduction(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever backward has passed the unit, before its reduction."""
        reduce = self._owner.post_backward

        def post_backward(*unused: Any) -> None:
            call()
            reduce(*unused)

        self._owner.post_backward = post_backward

    def after_reduction(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever backward has passed the unit, after its reduction."""
        reduce = self._owner.post_backward

        def post_backward(*unused: Any) -> None:
            reduce(*unused)
            call()

        self._owner.post_backward = post_backward

    def after_gather(self, call: Callable[[Iterator[tuple[Tensor, Tensor]]], None]) -> None:
        """Call ``call`` whenever modules get the gathered parameters.

        Args:
            call: Receives the :attr:`trained` members, each sharded and gathered.
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
        """Run calls before the unit is gathered and after its shards have been read.

        Shards are read when gathering starts; a single rank reads them when it waits for the unit.
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
        self, reduce: Callable[[list[Tensor | None]], None], is_enabled: Callable[[], bool]
    ) -> None:
        """Pass gradients to ``reduce`` permanently; the sharded parameters get none.

        ``fully_shard`` would reduce them in its group and set a sharded tensor as each parameter's
        gradient. Here it only switches between sharded and gathered parameters.

        Args:
            reduce: Called when backward has passed the unit, or at the end of backward if it did
                not reach the unit. Receives the gradients of the :attr:`trained` members, None
                for those without one, and must not keep them.
            is_enabled: Checked on each call; if false, ``fully_shard`` reduces as usual.
        """
        owner, trained = self._owner, [member._member for member in self.trained]
        original = owner.post_backward

        def post_backward(*unused: Any) -> None:
            if not is_enabled():
                original(*unused)
                return
            owner._training_state = TrainingState.POST_BACKWARD
            gathered = [hasattr(member, "_unsharded_param") for member in trained]
            gradients = [_pop_gradient(member) for member in trained] if any(gathered) else []
            if owner.reshard_after_backward:
                owner.reshard()
            if gradients:
                reduce(gradients)

        owner.post_backward = post_backward

    def read_in_place(
        self,
        full_parameters: Sequence[Tensor],
        on_use: Callable[[], None],
        on_gather: Callable[[], None],
    ) -> None:
        """Replace gathered parameters permanently by views of memory that has them in full.

        ``fully_shard`` gathers in its group, waits, switches the modules between sharded and
        gathered parameters, and frees the latter. Only the switching remains.

        Args:
            full_parameters: Their memory, (N * S,) each, in the order of :attr:`members`.
            on_use: Called whenever the gathered unit is needed.
            on_gather: Called when it would have been gathered.
        """
        for parameter, memory in zip(self._owner.fsdp_params, full_parameters, strict=True):
            parameter.all_gather_outputs = [memory]
            parameter.free_unsharded_param = _do_nothing
        self._gather_by(_do_nothing, on_use, on_gather)

    def gather_alone(self) -> None:
        """Gather permanently without collectives, on a single rank.

        Shards of the type and device of forward are used in place. The others are copied at once:
        ``fully_shard`` casts and copies the parameters one by one, which on a GPU takes the host
        longer than small blocks compute.
        """
        copied = []
        for member in self._owner.fsdp_params:
            if _use_in_place(member):
                continue
            copied.append(member)
            numel, dtype = member._sharded_param_data.numel(), member.param_dtype
            dtype = dtype or member.orig_dtype
            member.init_all_gather_outputs([numel], [dtype], 1, member.device)
            member.free_unsharded_param()

        def copy() -> None:
            for member in copied:
                member.alloc_all_gather_outputs()
            outputs = [member.all_gather_outputs[0] for member in copied]
            # Autograd has saved the same memory in forward, with the same values.
            autograd: Any = torch.autograd
            with autograd._unsafe_preserve_version_counter(tuple(outputs)):
                torch._foreach_copy_(outputs, [member._sharded_param_data for member in copied])

        self._gather_by(copy if copied else _do_nothing, _do_nothing, _do_nothing)
        if not copied:  # freeing after forward would save no memory
            self._owner.post_forward_mesh_info = None

    def _gather_by(
        self, fill: Callable[[], None], on_use: Callable[[], None], on_gather: Callable[[], None]
    ) -> None:
        """Replace the collective and the copies of ``fully_shard``; the switching remains.

        Args:
            fill: Fills ``all_gather_outputs`` of the parameters.
            on_use: Called whenever the gathered unit is needed.
            on_gather: Called when it would have been gathered.
        """
        owner = self._owner
        result = AllGatherResult(torch.empty(0), None, None, [], [], [])

        def unshard(async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's interface
            on_use()
            pending = owner._all_gather_result is not None
            stays_gathered = not owner.unshard_in_backward and (
                owner._training_state == TrainingState.PRE_BACKWARD
            )
            if not (pending or owner.is_unsharded or stays_gathered):
                on_gather()
                owner._all_gather_result = result

        def wait_for_unshard() -> None:
            if owner._all_gather_result is None:
                return
            owner._all_gather_result = None
            fill()
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


def remove_fully_shard(unit: FSDPModule, full_parameters: Sequence[nn.Parameter]) -> None:
    """Restore the plain module that a unit was before ``fully_shard``.

    Args:
        unit: A unit that is not gathered.
        full_parameters: Plain parameters in the order of :attr:`UnitParameters.members`.
    """
    module = cast("nn.Module", unit)
    state = _state_of(module)
    parameters = parameters_of(unit)
    if parameters is not None:
        for member, full in zip(parameters.members, full_parameters, strict=True):
            member.give_back(full)
        parameters._remove_hooks()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    _composable_state._module_state_mapping.pop(module, None)
    vars(module).pop(STATE_KEY, None)
    vars(module).pop(REGISTRY_KEY, None)
    for part in module.modules():
        for mark in _MARKS:
            vars(part).pop(mark, None)
    module.__class__ = type(module).__bases__[1]  # bases: FSDPModule and the module's own class


@contextmanager
def as_gathered(sharded: DTensor, gathered: Tensor) -> Iterator[None]:
    """Make a sharded parameter the gathered one, in its memory, within a ``with`` block.

    It is a plain tensor there, of the type of ``gathered``, so that results computed from it are
    plain tensors, too, which scripts can keep or save. Data assigned to it ends up in ``gathered``.

    Args:
        sharded: The sharded parameter.
        gathered: The gathered parameter, valid until the block ends.
    """
    saved = sharded._local_tensor, sharded._spec
    mesh = sharded.device_mesh
    memory = gathered.detach()
    plain = nn.Parameter(memory, requires_grad=sharded.requires_grad)
    torch._C._swap_tensor_impl(sharded, plain)
    sharded._local_tensor = memory
    sharded._spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=saved[1].tensor_meta)
    try:
        yield
    finally:
        torch._C._swap_tensor_impl(sharded, plain)
        sharded._local_tensor, sharded._spec = saved
        if plain.data_ptr() != memory.data_ptr():
            memory.copy_(plain.detach())


def copy_as_shards(gradients: Sequence[Tensor], memory: Tensor, ranks: int) -> None:
    """Copy full gradients to memory, rank by rank, in the layout of the shards.

    Args:
        gradients: Gradients of a unit, each sharded along its first dimension.
        memory: (N * S,), filled; padding becomes zero.
        ranks: N.
    """
    torch._chunk_cat(list(gradients), dim=0, num_chunks=ranks, out=memory.view(ranks, -1))


def _pop_gradient(member: Any) -> Tensor | None:
    """Remove and return the full gradient of a parameter, None if it was never gathered."""
    if not hasattr(member, "_unsharded_param"):
        return None
    gathered = member._unsharded_param
    gradient = get_raw_gradient(gathered)
    set_raw_gradient(gathered, None)
    return cast("Tensor | None", gradient)


def _use_in_place(member: Any) -> bool:
    """Make a single rank's shard the gathered parameter, if forward can read it as it is."""
    shard, sharded = member._sharded_param_data, member.sharded_param
    is_cast = member.param_dtype not in (None, shard.dtype)
    is_split_twice = sharded.device_mesh.ndim > 1  # tensor parallelism
    if is_cast or is_split_twice or shard.device != member.device:
        return False
    size = sharded.shape
    # A detached view would share the version counter, and the step would invalidate saved tensors.
    full = shard.data[: size.numel()].view(size)
    member._unsharded_param = nn.Parameter(full, requires_grad=sharded.requires_grad)
    member.free_unsharded_param = _do_nothing
    return True


def _do_nothing() -> None:
    return


if not hasattr(FSDPModule, "reset_iter_state"):  # before torch 2.13
    ENGINE_PARTS["older_torch"]()
