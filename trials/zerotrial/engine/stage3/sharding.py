"""Sharding a model with ``fully_shard``, unit by unit, and explaining why it cannot be sharded.

Every trainable parameter becomes a ``DTensor`` sharded along its first dimension. With R rows on N
ranks, rank r has ``ceil(R / N)`` rows from row ``r * ceil(R / N)``. A rank's shard is therefore one
contiguous range of the flattened parameter.
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
from zerotrial.engine.memory.copy_on_write import is_copy_on_write
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.full_tensor import swap_memory
from zerotrial.engine.module.gradient_hooks import hooks_of, restore_hooks
from zerotrial.engine.module.precision import uncast_parameters
from zerotrial.engine.module.replicated_parameters import choose_replicated
from zerotrial.engine.module.units import Unit, plan_units, requested_units
from zerotrial.engine.protocols import ENGINE_PARTS
from zerotrial.engine.stage3.internals import (
    make_root,
    parameters_of,
    restore_class_name,
)
from zerotrial.engine.stage3.prefetch import configure_prefetch

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.protocols import StageInputs

_REMEDY = "use zero_optimization.stage 0, 1 or 2, which take any module"


def shard_module(
    inputs: StageInputs,
    comm: Communicator,
    mesh: DeviceMesh,
    originals: FrozenOriginals,
) -> list[FSDPModule]:
    """Shard the model in place, from rank 0's values. **Collective**.

    Args:
        inputs: Inputs of the stage. Missing values of the model are filled unit by unit.
        comm: Communicator of the data-parallel ranks.
        mesh: One-dimensional mesh of the same ranks.
        originals: Stores frozen parameters that are rounded.

    Returns:
        The units, inner ones first and the root last.

    Raises:
        ConfigError: If ``fully_shard`` cannot shard the model.
    """
    module = inputs.module
    hooks = hooks_of(module)
    trained = {named.parameter for group in inputs.groups for named in group.parameters}
    for parameter in set(module.parameters()) - trained:
        parameter.requires_grad_(False)  # noqa: FBT003 - torch's interface
    ignored = choose_replicated(module, inputs.config.zero_optimization)
    _check_shardable(module)
    meta_init = _find_meta_init(inputs, comm)
    uncast = uncast_parameters(module)
    if meta_init is None:
        _broadcast(inputs, comm, ignored)
        _prepare_types(inputs, trained, uncast, ignored, module, originals)
    zero = inputs.config.zero_optimization
    offloads_parameters = zero.offload_param.device == "cpu" and inputs.device.type != "cpu"
    leaves = zero.leaf_module.classes
    in_full = _fp32_modules(inputs)
    units = plan_units(
        module,
        wrap=requested_units(module),
        leaves=leaves,
        apart=in_full,
        ignored=ignored,
    )
    order: Iterable[Unit] = units
    if meta_init is not None:
        unit_of = {unit.module: unit for unit in units}
        order = (unit_of[part] for part in meta_init.in_order(list(unit_of)))
    for unit in order:
        if meta_init is not None:
            _prepare_types(inputs, trained, uncast, ignored, unit.module, originals)
        compute = None if unit.module in in_full else inputs.precision.compute
        full_parameters = [p for p in unit.module.parameters() if not isinstance(p, DTensor)]
        values = [p.data for p in full_parameters] if inputs.memory.in_files else []
        _shard_unit(unit, mesh, inputs, compute, ignored)
        inputs.memory.adopt(unit.module, values)
        # The groups still refer to the full parameters, which would fill the device.
        if meta_init is not None or offloads_parameters:
            _free_parameters(set(full_parameters) - ignored)
    restore_hooks(module, hooks)
    configure_prefetch(module, units, inputs.config.zero_optimization)
    _guard_forward(module)
    return [cast("FSDPModule", unit.module) for unit in units]


def _find_meta_init(inputs: StageInputs, comm: Communicator) -> Any:
    """Return the model's unit-wise initialization; None if it has all values. **Collective**."""
    if inputs.weights is None:
        values = (*inputs.module.parameters(), *inputs.module.buffers())
        count = sum(value.is_meta or is_copy_on_write(value) for value in values)
        missing = comm.sum(torch.tensor([count], dtype=torch.float64, device=inputs.device))
        if not missing.item():
            return None
    return ENGINE_PARTS["meta_init"](inputs.module, comm, inputs.device, inputs.weights)


def _broadcast(inputs: StageInputs, comm: Communicator, replicated: set[nn.Parameter]) -> None:
    """Give every rank rank 0's values, on the engine's device, or in host memory if offloaded.

    Offloaded parameters visit the device one by one, so that it need not hold all of them.
    """
    module = inputs.module
    offloaded = inputs.config.zero_optimization.offload_param.device != "none"
    visiting = set(module.parameters()) - replicated if offloaded else set()
    if not visiting:
        module.to(inputs.device)
    for value in (*module.parameters(), *module.buffers()):
        on_device = value.data.to(inputs.device)
        comm.broadcast(on_device)
        value.data = on_device.to("cpu") if value in visiting else on_device
        inputs.memory.release(value.data)


def _free_parameters(parameters: set[nn.Parameter]) -> None:
    """Free full parameters after sharding; groups and optimizers still reference them."""
    for parameter in parameters:
        swap_memory(parameter, torch.empty_like(parameter, device="meta"))


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
        # The engine casts inputs of the model at every stage.
        cast_forward_inputs=False,
    )
    try:
        fully_shard(
            unit.module,
            mesh=mesh,
            # The root is needed throughout forward and at once in backward: freeing saves nothing.
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
    restore_class_name(unit.module)
    # Parameters used on some ranks only must be reduced on all, or gradients would mix.
    sharded.set_reduce_scatter_unused_params(
        inputs.config.zero_optimization.ignore_unused_parameters
    )


def _fp32_modules(inputs: StageInputs) -> set[nn.Module]:
    """Return modules that always compute in fp32: batch norms, whose statistics are fp32."""
    if inputs.precision.compute is None:
        return set()
    uncast = uncast_parameters(inputs.module)
    return {
        child
        for child in inputs.module.modules()
        if any(parameter in uncast for parameter in child.parameters(recurse=False))
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


def _prepare_types(  # noqa: PLR0917 - two callers
    inputs: StageInputs,
    trained: set[nn.Parameter],
    uncast: set[nn.Parameter],
    replicated: set[nn.Parameter],
    module: nn.Module,
    originals: FrozenOriginals,
) -> None:
    """Cast trained parameters to fp32 masters, and the others to the type of forward."""
    compute = inputs.precision.compute
    offloaded = inputs.config.zero_optimization.offload_param.device != "none"
    names = {parameter: name for name, parameter in inputs.module.named_parameters()}
    for parameter in module.parameters():
        if not parameter.is_floating_point() or isinstance(parameter, DTensor):
            continue
        kind = parameter.dtype
        if compute is not None and parameter not in uncast:
            kind = inputs.precision.master if parameter in trained else compute
        on_host = offloaded and parameter not in replicated
        device = torch.device("cpu") if on_host else parameter.device
        is_rounded = torch.promote_types(parameter.dtype, kind) != kind
        if is_rounded and trained and parameter not in trained:
            originals.keep(names[parameter], parameter)
        parameter.data = parameter.data.to(device, kind).contiguous()


def initialize_root(module: nn.Module) -> None:
    """Make the whole model the root of its units, which may then run in any order.

    By default ``fully_shard`` makes the first module that runs the root, which may be a submodule
    that was called directly.

    Args:
        module: The sharded model, laid out.
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


def reset_units(units: Sequence[FSDPModule]) -> None:
    """Reset units after a backward that raised, and discard their gradients."""
    units[-1].reset_iter_state()
    for unit in units:
        parameters = parameters_of(unit)
        for member in parameters.members if parameters is not None else ():
            member.forget_gradients()


def _guard_forward(module: nn.Module) -> None:
    """Explain errors of weights that are read outside of the unit that gathers them."""
    forward = module.forward

    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            # The next forward must not find a unit that is still gathered.
            cast("FSDPModule", module).reset_iter_state()
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise EngineError(
                "stage 3: forward reads a weight outside the module that owns it, where it is "
                "not gathered; read it as an attribute (module.weight) without compile.enabled, "
                "name the class of a module that contains both in "
                f"zero_optimization.leaf_module.classes, or {_REMEDY}"
            ) from error

    module.forward = guarded
