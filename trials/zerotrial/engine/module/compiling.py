"""``torch.compile`` by a key of the config, block by block.

Compiling blocks rather than the whole model keeps the engine's hooks, which gather parameters and
send gradients, out of the compiled graphs, and blocks of one class share one compilation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zerotrial.engine.module.units import find_blocks

if TYPE_CHECKING:
    from zerolab.config.engine.runtime import CompileConfig


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
        block.forward = torch.compile(
            block.forward,
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
        )
    return [name for name, _ in blocks]
