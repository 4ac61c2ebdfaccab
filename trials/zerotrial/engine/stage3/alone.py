"""Lets parts of a model be called on their own, outside of its forward, where nothing is trained.

What belongs to no block (embeddings, last norms, heads) is of the root unit, and that is gathered
when the whole model is called. ``generate`` of an encoder and decoder calls the encoder alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerolab.errors import EngineError
from zerotrial.engine.stage3.internals import UnitParameters, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["gather_when_alone"]


def gather_when_alone(units: Sequence[FSDPModule]) -> None:
    """Have every part of a model that reads weights of the root unit gather it, if nobody has.

    **Collective** is then what calls such a part without gradients: each rank must do it as
    often. With gradients it raises ``EngineError``, as no backward would reduce them.

    Args:
        units: All of them, the root last; sharded.
    """
    root = units[-1]
    module, parameters = cast("nn.Module", root), parameters_of(root)
    if parameters is None:
        return
    own = {member.sharded for member in parameters.members}
    for name, part in module.named_modules():
        if part is not module and not own.isdisjoint(part.parameters()):
            gathering = _Gathering(name, root, parameters)
            part.register_forward_pre_hook(gathering.before)
            part.register_forward_hook(gathering.after, always_call=True)


class _Gathering:
    """Gathers the root unit around the forward of one part, if it is not gathered.

    Args:
        name: Of the part.
        root: The unit.
        parameters: Of the unit.
    """

    def __init__(self, name: str, root: FSDPModule, parameters: UnitParameters) -> None:
        self._name = name
        self._root = root
        self._parameters = parameters
        self._opened = False

    def before(self, part: nn.Module, inputs: Any) -> None:
        del part, inputs
        if torch.compiler.is_compiling() or self._parameters.gathered:
            return
        if torch.is_grad_enabled():
            raise EngineError(
                f"stage 3: {self._name} was called outside of the model's forward, where its "
                "weights are not gathered and get no gradients; call it within the model's "
                "forward, or under torch.no_grad(), or use zero_optimization.stage 0, 1 or 2"
            )
        self._root.unshard()
        self._opened = True

    def after(self, part: nn.Module, inputs: Any, output: Any) -> None:
        del part, inputs, output
        if self._opened:
            self._opened = False
            self._root.reshard()
