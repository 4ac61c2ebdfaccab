"""``load_state_dict`` of a model that an engine trains, with full tensors."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from zerotrial.engine.module.compilation import strip_compiled
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.full_tensor import is_sharded

__all__ = ["WriteFull", "accept_full_tensors"]

WriteFull = Callable[[Tensor], None]
"""Function that writes a full tensor to this rank's shard of one parameter."""


def accept_full_tensors(
    module: nn.Module,
    shards: Mapping[nn.Module, Mapping[str, WriteFull]],
    originals: FrozenOriginals,
) -> None:
    """Make ``load_state_dict`` of the model and its submodules write to the engine's memory.

    It needs no communication: a rank with the full tensors takes its shards from them, and torch
    copies the sharded tensors of the module's own ``state_dict``.
    ``assign=True`` copies, too, because the engine trains the parameters that it knows.

    Args:
        module: The engine's module; its hooks are removed when the engine is closed.
        originals: Originals of rounded frozen parameters.
        shards: Writers by module and parameter name; empty below stage 3.
    """
    frozen: dict[nn.Module, dict[str, WriteFull]] = {}
    for name in originals.names:
        path, _, local_name = name.rpartition(".")
        frozen.setdefault(module.get_submodule(path), {})[local_name] = partial(
            originals.write, name
        )
    for part in module.modules():
        register: Any = part.register_load_state_dict_pre_hook
        register(_Writer(shards.get(part, {}), frozen.get(part, {})))


def _strip_names(state: dict[str, Any], prefix: str) -> None:
    """Accept the names of a compiled model: the engine has unwrapped modules."""
    for name in [name for name in state if name.startswith(prefix)]:
        plain = prefix + strip_compiled(name.removeprefix(prefix))
        if plain != name:
            state[plain] = state.pop(name)


class _Writer:
    """Hook of one module; copies and pickles of it do nothing.

    Args:
        shards: Writers of sharded parameters, by name.
        originals: Writers of rounded frozen parameters, by name.
    """

    def __init__(
        self,
        shards: Mapping[str, WriteFull] | None = None,
        originals: Mapping[str, WriteFull] | None = None,
    ) -> None:
        self._shards, self._originals = shards, originals or {}

    def __deepcopy__(self, memo: Any) -> "_Writer":
        return _Writer()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Writer, ())

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *arguments: Any,
    ) -> None:
        """Write the full tensors of the state; torch then copies the sharded and other ones."""
        del arguments
        if self._shards is None:
            return
        if metadata.get("assign_to_params_buffers"):
            metadata["assign_to_params_buffers"] = False
        _strip_names(state, prefix)
        for name, write in (*self._originals.items(), *self._shards.items()):
            value, current = state.get(prefix + name), getattr(module, name)
            if not isinstance(value, Tensor) or is_sharded(value):
                continue
            if value.shape == current.shape:
                write(value.detach())
        for name in self._shards:
            current = getattr(module, name)
            full = state.get(prefix + name)
            if not isinstance(full, Tensor) or is_sharded(full):
                continue
            if is_sharded(current) and full.shape == current.shape:
                state[prefix + name] = current.detach()  # torch copies it to itself
