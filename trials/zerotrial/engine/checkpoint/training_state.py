"""What an engine gives to be saved, and takes back when it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerotrial.engine.checkpoint.state import Stateful
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.progress import Progress, WindowState
from zerotrial.engine.seams import Stage

__all__ = ["TrainingState"]


@dataclass(frozen=True)
class TrainingState:
    """The parts of an engine that a checkpoint holds."""

    module: nn.Module
    stage: Stage
    zero_stage: int
    trainable: Mapping[str, torch.Size]
    """Name to whole shape of every parameter that the optimizer updates."""

    mesh: Mesh
    """Its data axis saves and loads together; other parts of the model have other directories."""

    progress: Progress
    """Counters, and micro-batches whose gradients wait for the accumulation boundary."""

    scaler: LossScaler
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    """``counters``, ``loss_scaler``, ``lr_scheduler``, ... by the name they are saved under."""

    def window(self) -> WindowState:
        """Return where the engine is between two accumulation boundaries."""
        return self.progress.window(self.scaler.scale)

    def forget_window(self) -> None:
        """Go back to the last boundary, and drop the gradients since. **Collective**."""
        if self.progress.broken or self.progress.waiting:
            self.stage.cancel_backward()
        self.module.zero_grad()
        self.progress.return_to_boundary()
