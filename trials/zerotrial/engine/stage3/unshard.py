"""Restoring the plain module when its stage 3 engine is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from zerotrial.engine.module.full_tensor import full_tensor_of
from zerotrial.engine.stage3.internals import parameters_of, remove_fully_shard
from zerotrial.engine.stage3.layout import gather_parameter

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.module.gradient_hooks import GradientHooks
    from zerotrial.engine.module.ownership import ModelOwnership
    from zerotrial.engine.stage3.layout import Layout


def unshard_model(  # noqa: PLR0917 - two callers
    units: Sequence[FSDPModule],
    layout: Layout,
    comm: Communicator,
    device: torch.device,
    ownership: ModelOwnership,
    hooks: GradientHooks,
) -> None:
    """Replace sharded parameters by full ones in the types of forward. **Collective**.

    Args:
        units: All units, the root last; none is gathered.
        layout: Locations of the shards.
        comm: Communicator of the ranks with the shards.
        device: Device of the full parameters.
        ownership: Has the parameters' former marks; records which new one replaces which old one.
        hooks: Gradient hooks, moved to the new parameters.
    """
    root = cast("nn.Module", units[-1])
    names: dict[Any, str] = {parameter: name for name, parameter in root.named_parameters()}
    shards: dict[Any, Any] = {shard.parameter: shard for shard in layout.shards}
    for unit in units:
        parameters = parameters_of(unit)
        full_parameters = []
        for member in [] if parameters is None else parameters.members:
            old: Any = member.sharded
            if old in shards:
                value = gather_parameter(shards[old], comm, device)
            else:
                value = full_tensor_of(old.detach())
            full = value.detach().to(device, member.forward_dtype, copy=True)
            new = ownership.replace(names[old], old, full)
            hooks.give_back(old, new)
            hooks.connect([(old, new)])
            full_parameters.append(new)
        remove_fully_shard(unit, full_parameters)
