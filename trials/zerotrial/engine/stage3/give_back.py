"""Making a model plain again when its stage 3 engine is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from zerotrial.engine.module.full_tensor import full_tensor_of
from zerotrial.engine.stage3.internals import parameters_of, undo
from zerotrial.engine.stage3.layout import whole_parameter

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import FSDPModule

    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.module.gradient_hooks import GradientHooks
    from zerotrial.engine.module.ownership import ModelOwnership
    from zerotrial.engine.stage3.layout import Layout


def give_back(  # noqa: PLR0917 - two callers
    units: Sequence[FSDPModule],
    layout: Layout,
    comm: Communicator,
    device: torch.device,
    ownership: ModelOwnership,
    hooks: GradientHooks,
) -> None:
    """Put whole parameters into the model, in the types in which it computes. **Collective**.

    Args:
        units: All of them, the root last; none is gathered.
        layout: Where the shards lie.
        comm: Between the ranks that have them.
        device: Of the whole parameters.
        hooks: On gradients; the new parameters get them.
        ownership: Knows what marks the parameters had; is told which new ones stand for old ones.
    """
    root = cast("nn.Module", units[-1])
    names: dict[Any, str] = {parameter: name for name, parameter in root.named_parameters()}
    shards: dict[Any, Any] = {shard.parameter: shard for shard in layout.shards}
    for unit in units:
        parameters = parameters_of(unit)
        wholes = []
        for member in [] if parameters is None else parameters.members:
            old: Any = member.sharded
            if old in shards:
                value = whole_parameter(shards[old], comm, device)
            else:
                value = full_tensor_of(old.detach())
            whole = value.detach().to(device, member.forward_dtype, copy=True)
            new = ownership.replace(names[old], old, whole)
            hooks.give_back(old, new)
            hooks.connect([(old, new)])
            wholes.append(new)
        undo(unit, wholes)
