"""Gathering of weights that a forward reads outside of the module that owns them.

Examples are ``linear(x, self.embedding.weight)`` in a language model, and a layer that reads the
weight of another layer. Such a read finds the weight sharded, so it gathers the unit of the weight.
The backward of the read needs the weight at a time that ``fully_shard`` does not know. From its
first such read on, a unit therefore stays gathered from its first use in a forward to the end of
the backward pass.

Reads go through a dictionary that replaces ``_parameters`` of the modules. DeepSpeed does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from zerotrial.engine.stage3.internals import outside_of_passes, parameters_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["OutsideReads"]


class OutsideReads:
    """Units of which a forward has read weights outside of their modules.

    Args:
        units: All units, the root last; sharded and started. The root is gathered throughout.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._root = units[-1]
        self._units: dict[FSDPModule, None] = {}
        self._watched: list[nn.Module] = []
        for unit in units[:-1]:
            parameters = parameters_of(unit)
            sharded = set() if parameters is None else {m.sharded for m in parameters.members}
            for part in cast("nn.Module", unit).modules() if sharded else ():
                if not sharded.isdisjoint(part.parameters(recurse=False)):
                    part._parameters = _Parameters(part._parameters, self, unit)  # noqa: SLF001 - as DeepSpeed
                    self._watched.append(part)

    def gather(self, unit: FSDPModule) -> None:
        """Gather a unit because of a read, if a pass is running. **Collective** in a pass."""
        if outside_of_passes(self._root):
            return
        if unit not in self._units:
            self._units[unit] = None
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        unit.unshard()

    def before_backward(self) -> None:
        """Gather the units again that an earlier backward of the same forward has freed."""
        for unit in self._units:
            unit.unshard()

    def after_backward(self) -> None:
        """Free the units."""
        for unit in self._units:
            unit.reshard()

    def close(self) -> None:
        """Give the modules plain dictionaries again."""
        for part in self._watched:
            part._parameters = dict(part._parameters)  # noqa: SLF001 - as above
        self._watched.clear()


class _Parameters(dict[str, Any]):
    """Parameters of one module; a read of a sharded one gathers its unit."""

    def __init__(self, content: Mapping[str, Any], reads: OutsideReads, unit: FSDPModule) -> None:
        super().__init__(content)
        self._reads = reads
        self._unit = unit

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if type(value) is nn.Parameter or not isinstance(value, DTensor):
            return value
        self._reads.gather(self._unit)
        return super().__getitem__(name)
