"""Blocks of the engine file for pipeline and tensor parallelism.

A tensor-parallel plan maps patterns of layer names to the sharding of the layer's matrix. A
layer's input and output layouts are **replicate** (full on every rank), **split** (divided along
the last dimension, features or heads) or **sequence** (divided along dimension 1, the tokens).
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from zerolab.schema.section import NonNegativeInt, PositiveInt, Section, hint, suggest

__all__ = [
    "STYLES",
    "LayerPlan",
    "PipelineConfig",
    "ScheduleName",
    "TensorParallelConfig",
    "layer_plan",
]

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
"""Order in which micro-batches pass the stages of a pipeline."""


class PipelineConfig(Section):
    """Execution of a ``PipelineModule``; its layers are configured in the code that builds it."""

    stages: PositiveInt | None = None
    """Pipeline stages; null means the number of the ``PipelineModule``. If it is set, batch sizes
    and keys that conflict with pipeline stages are checked before anything starts."""

    schedule: ScheduleName = "1f1b"
    """``1f1b``: each stage turns to backward as soon as it can; ``gpipe``: all forwards first;
    ``interleaved``: several chunks on each rank, for a smaller bubble; ``zero-bubble``: a stage
    computes gradients of weights when it would otherwise wait."""

    activation_checkpoint_interval: NonNegativeInt = 0
    """Layers that are recomputed together in backward; 0 means the value of the
    ``PipelineModule``. ``activation_checkpointing`` decides where their inputs are stored."""

    partition: str | None = hint(None, "set partition_method in PipelineModule(...)")
    """Partitioning of layers."""

    seed_layers: bool = hint(False, "set seed_layers in PipelineModule(...)")
    """Seed each layer by its index."""

    use_reentrant: bool = hint(
        True, "activations are always computed again without reentering autograd"
    )
    """Kind of activation checkpointing."""

    pipe_partitioned: bool = hint(True, "activations are sent whole")
    """Partition transferred activations over the tensor-parallel ranks."""

    grad_partitioned: bool = hint(True, "activations' gradients are sent whole")
    """Partition transferred gradients of activations over the tensor-parallel ranks."""


Style = Literal["colwise", "rowwise", "sequence", "summed", "experts", "replicate"]
Layout = Literal["replicate", "split", "sequence"]


class LayerPlan(Section):
    """Sharding of one layer."""

    style: Style
    """``colwise``: each rank has some of the outputs. ``rowwise``: some of the inputs.
    ``sequence``: full on each rank, for the rank's tokens. ``summed``: full on each rank, for the
    rank's inputs; gradients are summed. ``experts``: each rank has some of the experts of a
    mixture. ``replicate``: full on each rank."""

    input: Layout | None = None
    """Layout of its input; null means the style's."""

    output: Layout | None = None
    """Layout of its output; null means the style's."""

    blocks: PositiveInt = 1
    """Matrices that are concatenated in this one; each is sharded: 3 for query, key and value."""

    def __str__(self) -> str:
        """Return the style and the options that differ from its defaults."""
        more = {"input": self.input, "output": self.output, "blocks": self.blocks}
        options = [f", {key} {value}" for key, value in more.items() if value not in (None, 1)]
        return self.style + "".join(options)


STYLES: Mapping[str, Mapping[str, Any]] = {
    "colwise": {"style": "colwise"},
    "rowwise": {"style": "rowwise"},
    "sequence": {"style": "sequence"},
    "summed": {"style": "summed"},
    "experts": {"style": "experts"},
    "replicate": {"style": "replicate"},
    # torch's
    "ColwiseParallel": {"style": "colwise"},
    "RowwiseParallel": {"style": "rowwise"},
    "SequenceParallel": {"style": "sequence"},
    # those of Hugging Face models
    "colwise_gather_output": {"style": "colwise", "output": "replicate"},
    "colwise_rep": {"style": "colwise", "output": "replicate"},
    "rowwise_split_input": {"style": "rowwise", "input": "replicate"},
    "rowwise_rep": {"style": "rowwise", "input": "replicate"},
    "embedding_rowwise": {"style": "rowwise"},
    "embedding_colwise": {"style": "colwise", "output": "replicate"},
    "packed_colwise": {"style": "colwise", "blocks": 2},
    "packed_rowwise": {"style": "rowwise", "blocks": 2},
    "sequence_parallel": {"style": "sequence"},
    "replicated_with_grad_allreduce": {"style": "summed"},
    "ep_dispatch_experts": {"style": "experts"},
}
"""Names of styles and their meaning."""


def layer_plan(value: Any) -> Any:
    """Expand the name of a style; any other value is returned unchanged.

    Raises:
        ValueError: If the style is unknown.
    """
    if not isinstance(value, str):
        return value
    if value not in STYLES:
        styles = ", ".join(sorted(STYLES))
        raise ValueError(f"must be one of {styles}, got {value!r}{suggest(value, STYLES)}")
    return dict(STYLES[value])


class TensorParallelConfig(Section):
    """Sharding of a model's matrices over ranks."""

    size: PositiveInt = 1
    """Ranks that share one model; the data-parallel size is the number of all ranks divided by
    this."""

    plan: Literal["auto"] | dict[str, LayerPlan] = "auto"
    """Sharding of each layer, by a pattern of its name; ``*`` matches any part between two dots.
    ``auto``: the plan of the model, from ``tensor_parallel_plan()`` or, for a Hugging Face model,
    from its ``tp_plan`` and, for experts, its ``ep_plan``."""

    @field_validator("plan", mode="before")
    @classmethod
    def _expand_styles(cls, plan: Any) -> Any:
        if not isinstance(plan, Mapping):
            if plan != "auto":
                raise ValueError(f"must be 'auto' or map names of layers to styles, got {plan!r}")
            return plan
        expanded = {}
        for name, layer in plan.items():
            try:
                expanded[name] = layer_plan(layer)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return expanded
