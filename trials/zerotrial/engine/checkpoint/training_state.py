"""What an engine gives to be saved, and takes back when it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerotrial.engine.checkpoint.state import Stateful, module_targets
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.gradient_access import set_raw_gradient
from zerotrial.engine.progress import Progress, WindowState
from zerotrial.engine.protocols import Stage
from zerotrial.engine.tensor.model_sharding import ShardedModel

__all__ = ["TrainingState"]


@dataclass(frozen=True)
class TrainingState:
    """The parts of an engine that a checkpoint holds."""

    module: nn.Module
    stage: Stage
    zero_stage: int
    trainable: Mapping[str, torch.Size]
    """Name to whole shape of every parameter that the optimizer updates, in this rank's part."""

    everywhere: Mapping[str, torch.Size]
    """The same, in all parts that are saved together."""

    counted: frozenset[str]
    """Names of the parameters that this rank writes: each is written by one rank of those that are
    not cut over the data axis."""

    mesh: Mesh
    """Its ``saving`` axis saves and loads together; an mpu's other parts have other directories."""

    divided: ShardedModel
    """Which parameters are cut over tensor-parallel ranks, of which each writes its part."""

    progress: Progress
    """Counters, and micro-batches whose gradients wait for the accumulation boundary."""

    scaler: LossScaler
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    """``counters``, ``loss_scaler``, ``lr_scheduler``, ... by the name they are saved under."""

    def model_names(self) -> set[str]:
        """Return the names of all parameters and buffers of this rank's part."""
        return set(self.trainable) | set(module_targets(self.module, set(self.trainable)))

    def share_rank(self, rank: int) -> int:
        """Number the ranks that have gradients of their own: those of one model cut are one.

        Args:
            rank: Of those that save together.
        """
        return rank if self.mesh.whole is None else rank // self.mesh.tensor.size

    def window(self) -> WindowState:
        """Return where the engine is between two accumulation boundaries."""
        return self.progress.window(self.scaler.scale)

    def forget_window(self) -> None:
        """Go back to the last boundary, and drop the gradients since. **Collective**."""
        if self.progress.broken or self.progress.waiting:
            self.stage.cancel_backward()
        for parameter in self.module.parameters():  # what torch has; the stage has none any more
            set_raw_gradient(parameter, None)
        self.progress.return_to_boundary()
