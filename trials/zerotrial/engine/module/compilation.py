"""``torch.compile``, applied block by block.

Compiling blocks instead of the full model keeps the engine's hooks, which gather parameters and
reduce gradients, out of the compiled graphs. Blocks of one class share one compilation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotrial.engine.module.forward import ForwardReplacement
from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import CompileConfig


_WRAPPED = "_orig_mod"
"""Attribute with the module inside of a ``torch.compile`` wrapper."""


def compile_blocks(module: nn.Module, config: CompileConfig) -> list[str]:
    """Compile a model's blocks, if configured.

    Compilation happens when a block first runs. Call it before blocks are made to recompute and
    before the model is sharded.

    Args:
        module: The full model.
        config: The ``compile`` block; its keys are those of ``torch.compile``.

    Returns:
        Names of the compiled modules, the empty name for the full model; empty if disabled.
    """
    if not config.enabled:
        return []
    blocks = find_blocks(module) or [("", module)]
    for _, block in blocks:
        compiled = torch.compile(
            block.forward,
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
        )
        block.forward = ForwardReplacement(block.forward, compiled)
    return [name for name, _ in blocks]


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Replace ``torch.compile`` wrappers by the modules inside, with a compiled forward.

    A wrapper puts ``_orig_mod.`` into parameter names, which must not appear in checkpoints.

    Args:
        model: A model that is or contains wrappers, which are replaced in place.

    Returns:
        The model, or the one inside of its wrapper.
    """
    while _is_wrapper(model):
        model = _inner(model)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # noqa: SLF001 - named_children() skips repeated ones
            while child is not None and _is_wrapper(child):
                child = parent._modules[name] = _inner(child)  # noqa: PLW2901, SLF001 - as above
    return model


def strip_compiled(name: str) -> str:
    """Remove the prefixes of ``torch.compile`` wrappers from a name.

    Args:
        name: Name of a parameter, a buffer or a module.

    Returns:
        ``blocks.1.weight`` for ``_orig_mod.blocks.1._orig_mod.weight``; other names unchanged.
    """
    if _WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def _is_wrapper(module: nn.Module) -> bool:
    # By name: importing the class takes seconds.
    return type(module).__name__ == "OptimizedModule" and _WRAPPED in module._modules  # noqa: SLF001


def _inner(wrapper: Any) -> nn.Module:
    module: nn.Module = wrapper._orig_mod  # noqa: SLF001 - no public name
    by = wrapper.dynamo_ctx
    if getattr(vars(module).get("_compiled"), "by", None) is not by:  # else already replaced
        wrapper_ = ForwardReplacement(module.forward, by(module.forward), by)
        module.forward = vars(module)["_compiled"] = wrapper_
    return module
