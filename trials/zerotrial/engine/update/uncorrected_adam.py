"""Adam and AdamW without bias correction, on torch's own kernels.

Both corrections are ``1 - beta ** step``, and are 1 once ``step`` is very large. The kernels are
therefore given a step without end, while the states count the true one. That needs no other pass
over the parameters, whichever kernel runs: fused, for each tensor, on a GPU or a CPU.
"""

from typing import Any

import torch

__all__ = ["UncorrectedAdam", "UncorrectedAdamW"]

_ENDLESS = 2.0**100
"""A step at which ``beta ** step`` is 0 for every beta below 1; adding 1 leaves it as it is."""


class _Uncorrected(torch.optim.Optimizer):
    elementwise = True

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collect what the kernel gets; the steps are the last of torch's lists."""
        collect: Any = super()
        found = collect._init_group(group, *lists)  # noqa: SLF001 - pinned by a test
        if group.get("bias_correction", False):
            return found
        steps = lists[-1]
        for step in steps:
            step += 1  # noqa: PLW2901 - in place
        steps[:] = [torch.full_like(step, _ENDLESS) for step in steps]
        return found


class UncorrectedAdam(_Uncorrected, torch.optim.Adam):
    """``torch.optim.Adam``, whose moments are not corrected for their start at zero."""


class UncorrectedAdamW(_Uncorrected, torch.optim.AdamW):
    """``torch.optim.AdamW``, whose moments are not corrected for their start at zero."""
