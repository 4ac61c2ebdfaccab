"""``deepspeed.runtime.base_optimizer``: an engine's optimizer is torch's."""

from torch.optim import Optimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]
