"""``deepspeed.pipe`` and ``deepspeed.runtime.pipe``: models cut into pipeline stages."""

from typing import Any

from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.pipeline import PipelineEngine
from zerotrial.extensions.pipeline import layers, module, topology

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]

LayerSpec = layers.LayerSpec
TiedLayerSpec = layers.TiedLayerSpec
ProcessTopology = topology.ProcessTopology
PipeDataParallelTopology = topology.PipeDataParallelTopology


class PipelineModule(module.PipelineModule):
    """See :class:`zerotrial.PipelineModule`.

    Args:
        args: DeepSpeed's, in its order.
        activation_checkpoint_func: Not used; torch's own checkpointing is.
        checkpointable_layers: Only None, which computes all layers again.
        dynamic_shape: Not used; shapes may change from batch to batch.
        options: DeepSpeed's by name.

    Raises:
        ConfigError: With all problems of the arguments.
    """

    def __init__(
        self,
        *args: Any,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Any = None,
        dynamic_shape: bool = False,
        **options: Any,
    ) -> None:
        del activation_checkpoint_func, dynamic_shape
        if checkpointable_layers is not None:
            problem = (
                "checkpointable_layers: must be None, which computes the layers of every interval "
                f"again, got {checkpointable_layers!r}; choose activation_checkpoint_interval"
            )
            raise ConfigError("PipelineModule()", [problem])
        super().__init__(*args, **options)


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages, tensor-parallel ranks, and replicas of both.

    Args:
        num_pp: Pipeline stages.
        num_mp: Tensor-parallel ranks; ``tensor_parallel.size`` of the engine file says the same.
        num_dp: Replicas.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])
