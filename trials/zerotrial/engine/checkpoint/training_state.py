"""Training state of an engine, as input of saving and output of loading."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zerotrial.engine.checkpoint.state import Stateful, module_targets
from zerotrial.engine.loss_scale import LossScaler
from zerotrial.engine.mesh import Mesh
from zerotrial.engine.module.gradient_access import set_raw_gradient
from zerotrial.engine.module.sharded_model import ShardedModel
from zerotrial.engine.progress import Progress, WindowState
from zerotrial.engine.protocols import Stage

__all__ = ["TrainingState"]


@dataclass(frozen=True)
class TrainingState:
    """Parts of an engine that a checkpoint contains."""

    module: nn.Module
    stage: Stage
    zero_stage: int
    trainable: Mapping[str, torch.Size]
    """Full shapes of the parameters that the optimizer updates in this rank's part, by name."""

    everywhere: Mapping[str, torch.Size]
    """The same for all parts that are saved together."""

    counted: frozenset[str]
    """Names of the parameters that this rank writes: one of the ranks that are not sharded over the
    data axis writes each parameter."""

    mesh: Mesh
    """Mesh; its ``saving`` axis saves together, an mpu's other parts use other directories."""

    divided: ShardedModel
    """Parameters that are sharded over tensor-parallel ranks, each of which writes its part."""

    progress: Progress
    """Counters, and micro-batches with gradients that wait for the accumulation boundary."""

    scaler: LossScaler
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    """``counters``, ``loss_scaler``, ``lr_scheduler``, ... by their names in checkpoints."""

    def model_names(self) -> set[str]:
        """Return the names of all parameters and buffers of this rank's part."""
        return set(self.trainable) | set(module_targets(self.module, set(self.trainable)))

    def share_rank(self, rank: int) -> int:
        """Return the index of a rank's shares: tensor-parallel ranks of one model count as one.

        Args:
            rank: Rank within the group that saves together.
        """
        return rank if self.mesh.all_ranks is None else rank // self.mesh.tensor.size

    def window(self) -> WindowState:
        """Return the position between two accumulation boundaries."""
        return self.progress.window(self.scaler.scale)

    def drop_window(self) -> None:
        """Return to the last boundary, and drop later gradients. **Collective**."""
        if self.progress.broken or self.progress.waiting:
            self.stage.cancel_backward()
        for parameter in self.module.parameters():  # torch's gradients; the stage's are dropped
            set_raw_gradient(parameter, None)
        self.progress.return_to_boundary()
