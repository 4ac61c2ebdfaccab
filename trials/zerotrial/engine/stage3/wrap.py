"""Hands a model to ``fully_shard``, unit by unit, and says what stands in the way when it cannot.

Every trainable parameter becomes a ``DTensor`` cut along its first dimension: with R rows on N
ranks, rank r keeps rows ``r * ceil(R / N)`` and the next ``ceil(R / N)`` of them. A rank's part of
a parameter is therefore one contiguous range of its flattened elements.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.memory.mapped_files import release
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.gradient_hooks import hooks_of, restore_hooks
from zerotrial.engine.module.memory_swap import swap_memory
from zerotrial.engine.module.precision import uncast_parameters
from zerotrial.engine.module.replicated_parameters import is_replicated
from zerotrial.engine.module.units import Unit, plan_units, requested_units
from zerotrial.engine.stage3.absent import Absent, WeightFiles
from zerotrial.engine.stage3.gather import set_gathering
from zerotrial.engine.stage3.internals import (
    dress_class,
    make_root,
    parameters_of,
    reduce_unused_parameters,
    reset_iteration,
)
from zerotrial.engine.stage3.paged import to_files

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.memory.mapped_files import FileMemory
    from zerotrial.engine.protocols import StageInputs

_REMEDY = "use zero_optimization.stage 0, 1 or 2, which take any module"


def shard_module(
    inputs: StageInputs,
    comm: Communicator,
    mesh: DeviceMesh,
    files: FileMemory | None,
    originals: FrozenOriginals,
) -> list[FSDPModule]:
    """Shard the model in place, from rank 0's values. **Collective**.

    Args:
        inputs: The stage's; what the model has no values of is filled unit by unit.
        comm: Between the data-parallel ranks.
        mesh: The same ranks, in one dimension.
        originals: Get the frozen parameters that are rounded.
        files: Where each unit's shards go as soon as it is cut; None: they stay.

    Returns:
        The units, inner ones first and the root last.

    Raises:
        ConfigError: If ``fully_shard`` cannot take the model.
    """
    module = inputs.module
    hooks = hooks_of(module)
    trained = {named.parameter for group in inputs.groups for named in group.parameters}
    for parameter in set(module.parameters()) - trained:
        parameter.requires_grad_(False)  # noqa: FBT003 - torch's interface
    ignored = {p for p in module.parameters() if is_replicated(p)}
    _check_shardable(module)
    absent = _what_is_absent(inputs, comm)
    kept = uncast_parameters(module)
    if absent is None:
        module.to(inputs.device)
        for value in (*module.parameters(), *module.buffers()):
            comm.broadcast(value.data)
            release(value.data)
        _prepare_types(inputs, trained, kept, module, originals)
    leaves = inputs.config.zero_optimization.leaf_module.classes
    in_full = _in_full(inputs)
    units = plan_units(
        module,
        wrap=requested_units(module),
        leaves=leaves,
        apart=in_full,
        ignored=ignored,
    )
    order: Iterable[Unit] = units
    if absent is not None:
        of = {unit.module: unit for unit in units}
        order = (of[part] for part in absent.in_order(list(of)))
    for unit in order:
        if absent is not None:
            _prepare_types(inputs, trained, kept, unit.module, originals)
        compute = None if unit.module in in_full else inputs.precision.compute
        wholes = [p for p in unit.module.parameters() if not isinstance(p, DTensor)]
        if files is None:
            _shard_unit(unit, mesh, inputs, compute, ignored)
        else:
            values = [p.data for p in wholes]
            _shard_unit(unit, mesh, inputs, compute, ignored)
            to_files(cast("FSDPModule", unit.module), values, files)
        if absent is not None:
            _let_go(set(wholes) - ignored)
    restore_hooks(module, hooks)
    set_gathering(module, units, inputs.config.zero_optimization)
    _guard_forward(module)
    return [cast("FSDPModule", unit.module) for unit in units]


def _what_is_absent(inputs: StageInputs, comm: Communicator) -> Absent | None:
    """Find what fills the model unit by unit; None where all of it is there. **Collective**."""
    weights = None
    if inputs.weights is not None:
        weights = WeightFiles(inputs.weights)
        weights.check(inputs.module)
    if weights is None and not Absent.anywhere(inputs.module, comm, inputs.device):
        return None
    return Absent(inputs.module, comm, inputs.device, weights)


def _let_go(wholes: set[nn.Parameter]) -> None:
    """Free what has been cut: groups and optimizers know the whole parameters still."""
    for whole in wholes:
        swap_memory(whole, torch.empty_like(whole, device="meta"))


def _shard_unit(
    unit: Unit,
    mesh: DeviceMesh,
    inputs: StageInputs,
    compute: torch.dtype | None,
    ignored: set[nn.Parameter],
) -> None:
    precision = inputs.precision
    is_root = unit.module is inputs.module
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=precision.communicate or precision.accumulate,
        # What enters the model is cast by the engine, at every stage alike.
        cast_forward_inputs=False,
    )
    try:
        fully_shard(
            unit.module,
            mesh=mesh,
            # The root is needed from the first to the last moment of a forward, and again at once.
            reshard_after_forward=not is_root,
            mp_policy=policy,
            offload_policy=_offload(inputs),
            ignored_params=ignored,
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        name = unit.name or "the model"
        raise ConfigError(
            "stage 3", [f"{name} ({type(unit.module).__name__}): {error}; {_REMEDY}"]
        ) from error
    sharded = cast("FSDPModule", unit.module)
    dress_class(unit.module)
    # A parameter that only some ranks used must still take part on all, or the sums would mix.
    reduce_unused_parameters(
        sharded, enable=inputs.config.zero_optimization.ignore_unused_parameters
    )


def _in_full(inputs: StageInputs) -> set[nn.Module]:
    """Modules that compute in fp32 all the same: batch norms, whose statistics are fp32."""
    if inputs.precision.compute is None:
        return set()
    kept = uncast_parameters(inputs.module)
    return {
        child
        for child in inputs.module.modules()
        if any(parameter in kept for parameter in child.parameters(recurse=False))
    }


def _offload(inputs: StageInputs) -> OffloadPolicy:
    offload = inputs.config.zero_optimization.offload_param
    if offload.device == "none" or (offload.device == "nvme" and inputs.device.type == "cpu"):
        return OffloadPolicy()
    pinned = offload.pin_memory and offload.device == "cpu" and inputs.device.type == "cuda"
    return CPUOffloadPolicy(pin_memory=pinned)


def _check_shardable(module: nn.Module) -> None:
    problems = [
        f"module {name}: sparse gradients cannot be sharded; set sparse=False"
        for name, child in module.named_modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    ]
    if problems:
        raise ConfigError("stage 3", problems)


def _prepare_types(
    inputs: StageInputs,
    trained: set[nn.Parameter],
    kept: set[nn.Parameter],
    module: nn.Module,
    originals: FrozenOriginals,
) -> None:
    """Make trained parameters fp32 masters, and the rest what forward computes in."""
    compute = inputs.precision.compute
    offloaded = inputs.config.zero_optimization.offload_param.device != "none"
    names = {parameter: name for name, parameter in inputs.module.named_parameters()}
    for parameter in module.parameters():
        if not parameter.is_floating_point() or isinstance(parameter, DTensor):
            continue
        kind = parameter.dtype
        if compute is not None and parameter not in kept:
            kind = inputs.precision.master if parameter in trained else compute
        on_host = offloaded and not is_replicated(parameter)
        where = torch.device("cpu") if on_host else parameter.device
        rounds = torch.promote_types(parameter.dtype, kind) != kind
        if rounds and trained and parameter not in trained:
            originals.keep(names[parameter], parameter)
        parameter.data = parameter.data.to(where, kind).contiguous()


def start(module: nn.Module) -> None:
    """Make the whole model the root of its units; after this they may run in any order.

    Left to itself, ``fully_shard`` takes the first module that runs for the root, which may be a
    submodule that was called on its own.

    Args:
        module: The whole model, sharded and laid out.
    """
    try:
        make_root(module)
    except AssertionError as error:
        if "uniform original parameter dtype" not in str(error):
            raise
        raise ConfigError(
            "stage 3",
            [
                "model: a block must have its parameters in one type, which optimizer and "
                f"gradients share; set bf16.enabled or fp16.enabled, cast the model, or {_REMEDY}"
            ],
        ) from error


def start_over(units: Sequence[FSDPModule]) -> None:
    """Bring units back to where a step begins, after a backward that raised; forgets gradients."""
    reset_iteration(units[-1])
    for unit in units:
        parameters = parameters_of(unit)
        for member in parameters.members if parameters is not None else ():
            member.forget_gradients()


def _guard_forward(module: nn.Module) -> None:
    """Explain the error of a weight that is read outside the unit that gathers it."""
    forward = module.forward

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            # The next forward must find nothing half gathered.
            reset_iteration(cast("FSDPModule", module))
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise EngineError(
                "stage 3: forward reads a weight outside the module that owns it, where it is "
                "not gathered; name the class of a module that contains both in "
                f"zero_optimization.leaf_module.classes, or {_REMEDY}"
            ) from error

    module.forward = guarded
