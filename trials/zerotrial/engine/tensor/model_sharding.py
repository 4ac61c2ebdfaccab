"""Cuts a model's matrices over the tensor axis, and makes it whole again.

Parameters stay the plain ones that they were, with this rank's part as their value: the stages lay
them out like any other, and stage 3 shards each part over the data axis. What moves between ranks
is put around the forward of each layer that is cut; see
:mod:`zerotrial.engine.tensor.redistribution`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.comm.replicas import broadcast_module
from zerotrial.engine.protocols import NullObserver
from zerotrial.engine.tensor.first_batch import watch_first_batch
from zerotrial.engine.tensor.forward_wrappers import wrap
from zerotrial.engine.tensor.plan import find_layers
from zerotrial.engine.tensor.plan_validation import (
    Stages,
    cuts_of,
    heads_that_do_not_fit,
    layouts_of,
    other_users,
    tied_to_cut,
    ties_cut_otherwise,
    unsaid_blocks,
)
from zerotrial.engine.tensor.redistribution import Line
from zerotrial.engine.tensor.shard_spec import Cut, Span, mark, unmark

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import TensorParallelConfig
    from zerotrial.engine.mesh import Mesh

__all__ = ["Divided", "divide"]

logger = logging.getLogger(__name__)

_UNTIMED = NullObserver().phase


class Divided:
    """A model whose matrices are cut.

    Args:
        module: The model.
        cuts: By the first name of each parameter that is cut.
        line: The ranks that have its parts.
        by_tokens: Whether activations between layers are cut along the tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, Cut],
        line: Line,
        *,
        by_tokens: bool = False,
    ) -> None:
        self._module = module
        self.cuts = cuts
        self.line = line
        self.sharing = None if by_tokens else line
        """The ranks that have activations between layers in common."""
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def none(cls, module: nn.Module) -> Divided:
        """A model of which nothing is cut."""
        return cls(module, {}, Line(None, 0, 1, _UNTIMED))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Put a tensor of a parameter's shape together from all ranks. **Collective** if cut."""
        cut = self.cuts.get(name)
        if cut is None:
            return part
        own = part.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.line.size)]
        dist.all_gather(found, own, group=self.line.group)
        return cut.join(found)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Copy this rank's part of a tensor of a parameter's shape."""
        cut = self.cuts.get(name)
        return whole if cut is None else cut.take(whole)

    def shape(self, name: str, held: torch.Size) -> torch.Size:
        """Return the shape of a whole parameter of which this rank has one of shape ``held``."""
        cut = self.cuts.get(name)
        return held if cut is None else cut.shape

    def span(self, name: str) -> Span | None:
        """Where this rank's part of a parameter lies; None where it has all of it."""
        cut = self.cuts.get(name)
        return None if cut is None else cut.span

    def on_undo(self, action: Callable[[], None]) -> None:
        """Take note of what is to be done when the model becomes whole again."""
        self._undo.append(action)

    def undo(self) -> None:
        """Give every rank the whole model. **Collective**."""
        parameters = dict(self._module.named_parameters())
        for name in self.cuts:
            parameter = parameters[name]
            parameter.data = self.whole(name, parameter.data)
            parameter.grad = None
            unmark(parameter)
        for action in self._undo:
            action()
        self.cuts, self._undo = {}, []


def divide(
    module: nn.Module,
    config: TensorParallelConfig,
    mesh: Mesh,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = _UNTIMED,
) -> Divided:
    """Cut a model in place, from the first rank's values. **Collective** over a model's ranks.

    Afterwards all ranks of the axis draw the same random numbers, as what is whole on each must be
    dropped alike.

    Args:
        module: The model, or a pipeline stage of it; the same along the tensor axis but for its
            values.
        config: The ``tensor_parallel`` block.
        mesh: The ranks.
        device: Where values travel.
        phase: Times what runs inside; see :class:`~zerotrial.engine.protocols.Observer`.

    Raises:
        ConfigError: If the plan does not fit the model; nothing is cut then.
    """
    axis = mesh.tensor
    if axis.size == 1 or mesh.whole is None:  # an mpu's model is cut already, by the user
        return Divided.none(module)
    stages = Stages(mesh.pipe.group)
    layers, problems = find_layers(module, config, stages.union)
    names = {parameter: name for name, parameter in module.named_parameters()}
    followers = tied_to_cut(module, layers)
    cuts: dict[nn.Parameter, Cut] = {}
    for layer in [*layers, *followers]:
        for parameter, cut in cuts_of(layer, axis, problems):
            if cuts.setdefault(parameter, cut) != cut:
                problems.append(
                    f"{layer.name}: cuts {names[parameter]} along dimension {cut.dim}, and a layer "
                    f"that shares it along dimension {cuts[parameter].dim}; cut both alike"
                )
    problems += other_users(module, [*layers, *followers], cuts, names)
    problems += heads_that_do_not_fit(module, axis.size)
    problems += ties_cut_otherwise(module, cuts, names, stages)
    if problems := sorted(stages.union(set(problems))):  # each stage has layers of its own
        raise ConfigError("tensor_parallel", problems)
    line = Line(axis.group, axis.rank, axis.size, phase)
    broadcast_module(module, axis, device)
    _draw_alike(line, device)
    for parameter, cut in cuts.items():
        parameter.data = cut.take(parameter.data)
        mark(parameter, cut)
    by_tokens = any("sequence" in layouts_of(layer) for layer in layers)
    divided = Divided(
        module,
        {names[parameter]: cut for parameter, cut in cuts.items()},
        line,
        by_tokens=any(stages.allgather(by_tokens)),
    )
    for layer in [*layers, *followers]:
        wrap(layer, line, divided.on_undo)
    _watch(module, divided)
    watch_first_batch(module, [*layers, *followers], axis.size)
    if mesh.saving.rank == 0:
        for text in unsaid_blocks(layers):
            logger.warning("%s", text)
    return divided


def _draw_alike(line: Line, device: torch.device) -> None:
    """Give every rank the first one's random state."""
    state = [torch.get_rng_state()]
    dist.broadcast_object_list(state, group=line.group, group_src=0)
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        on_device = [torch.cuda.get_rng_state(device)]
        dist.broadcast_object_list(on_device, group=line.group, group_src=0)
        torch.cuda.set_rng_state(on_device[0], device)


def _watch(module: nn.Module, divided: Divided) -> None:
    """See to it that the ranks read the same micro-batch, and that no activation is kept."""
    line = divided.line

    def compare(_module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        found: list[Any] = [None] * line.size
        dist.all_gather_object(found, _fingerprint([args, kwargs]), group=line.group)
        if any(one != found[0] for one in found):
            raise EngineError(
                "tensor_parallel: the ranks that have one model between them must read the same "
                "micro-batch, and the first one differs; let loaders divide the data by "
                "engine.mesh.data.rank and .size, not by all ranks"
            )

    def forget(*_: Any) -> None:
        line.entered.forget()

    handle = module.register_forward_pre_hook(compare, with_kwargs=True)
    module.register_forward_hook(forget)


def _fingerprint(value: Any) -> list[Any]:
    """Shapes and sums of all tensors, cheap and good enough to tell two batches apart."""
    if isinstance(value, Tensor):
        wide = value.detach().double().reshape(-1)
        at = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
        return [tuple(value.shape), str(float(wide.sum())), str(float(torch.dot(wide, at.sqrt())))]
    if isinstance(value, Mapping):
        return [part for key in sorted(map(str, value)) for part in _fingerprint(value[key])]
    if isinstance(value, list | tuple):
        return [part for one in value for part in _fingerprint(one)]
    return []
