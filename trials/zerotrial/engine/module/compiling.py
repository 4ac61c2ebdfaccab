"""``torch.compile`` by a key of the config, block by block.

Compiling blocks rather than the whole model keeps the engine's hooks, which gather parameters and
send gradients, out of the compiled graphs, and blocks of one class share one compilation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotrial.engine.module.forward import AroundForward
from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import CompileConfig


_WRAPPED = "_orig_mod"
"""The attribute in which a wrapper of ``torch.compile`` keeps the module."""


def compile_blocks(module: nn.Module, config: CompileConfig) -> list[str]:
    """Compile a model's blocks, where the config asks for it.

    Nothing is compiled before a block runs for the first time. To be called before blocks are made
    to recompute and before the model is sharded.

    Args:
        module: The whole model.
        config: The ``compile`` block; its keys are those of ``torch.compile``.

    Returns:
        Names of what is compiled, the empty name for the whole model; empty when it is off.
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
        block.forward = AroundForward(block.forward, compiled)
    return [name for name, _ in blocks]


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Replace the wrappers of ``torch.compile`` by the modules inside, whose forward is compiled.

    A wrapper puts ``_orig_mod.`` into the names of parameters, which checkpoints must not have.

    Args:
        model: May be a wrapper, or contain some; they are replaced in place.

    Returns:
        The model, or what its wrapper contains.
    """
    while _is_wrapper(model):
        model = _inner(model)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # noqa: SLF001 - named_children() skips repeated ones
            while child is not None and _is_wrapper(child):
                child = parent._modules[name] = _inner(child)  # noqa: PLW2901, SLF001 - as above
    return model


def strip_compiled(name: str) -> str:
    """Remove what wrappers of ``torch.compile`` put into a name.

    Args:
        name: Of a parameter, a buffer or a module.

    Returns:
        ``blocks.1.weight`` for ``_orig_mod.blocks.1._orig_mod.weight``; other names as they are.
    """
    if _WRAPPED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


def _is_wrapper(module: nn.Module) -> bool:
    # By name: to import the class takes seconds.
    return type(module).__name__ == "OptimizedModule" and _WRAPPED in module._modules  # noqa: SLF001


def _inner(wrapper: Any) -> nn.Module:
    module: nn.Module = wrapper._orig_mod  # noqa: SLF001 - no public name
    by = wrapper.dynamo_ctx
    if getattr(vars(module).get("_compiled"), "by", None) is not by:  # else: a layer in two places
        around = AroundForward(module.forward, by(module.forward), by)
        module.forward = vars(module)["_compiled"] = around
    return module
