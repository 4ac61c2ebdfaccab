"""Adam and AdamW without bias correction, with torch's kernels.

Both corrections are ``1 - beta ** step``, and are 1 if ``step`` is very large. So the kernels get a
huge step, while the states count the real one. That needs no further pass over the parameters and
works with every kernel: fused, per tensor, on a GPU or a CPU.
"""

from typing import Any

import torch

__all__ = ["UncorrectedAdam", "UncorrectedAdamW"]

_HUGE_STEP = 2.0**100
"""Step for which ``beta ** step`` is 0 for every beta below 1; adding 1 does not change it."""


class _Uncorrected(torch.optim.Optimizer):
    elementwise = True

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collect the kernel's arguments; the steps are the last of torch's lists."""
        collect: Any = super()
        collected = collect._init_group(group, *lists)  # noqa: SLF001 - pinned by a test
        if group.get("bias_correction", False):
            return collected
        steps = lists[-1]
        for step in steps:
            step += 1  # noqa: PLW2901 - in place
        steps[:] = [torch.full_like(step, _HUGE_STEP) for step in steps]
        return collected


class UncorrectedAdam(_Uncorrected, torch.optim.Adam):
    """``torch.optim.Adam`` without bias correction."""


class UncorrectedAdamW(_Uncorrected, torch.optim.AdamW):
    """``torch.optim.AdamW`` without bias correction."""
