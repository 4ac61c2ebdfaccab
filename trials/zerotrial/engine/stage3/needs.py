"""What stage 3 needs of torch, checked before anything that only a newer torch has is imported."""

import torch
from torch.distributed.fsdp import FSDPModule

from zerolab.errors import ConfigError

_NEEDED = (
    "reset_iter_state",  # a step that raised can be begun anew
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_reduce_scatter_unused_params",  # ranks may use different parameters of a block
)


def check_torch() -> None:
    """Refuse a torch whose ``fully_shard`` is too old.

    Raises:
        ConfigError: If it is.
    """
    if all(hasattr(FSDPModule, name) for name in _NEEDED):
        return
    problem = (
        f"zero_optimization.stage: 3 needs torch 2.13 or newer, this is torch {torch.__version__}; "
        "install a newer one, or use stage 0, 1 or 2, which take any torch from 2.6 on"
    )
    raise ConfigError("engine config", [problem])
