"""Blocks of the engine file for models that are spread over ranks.

A plan of tensor parallelism says for each layer, by a pattern of its name, how its matrix is cut.
What a layer reads and gives is **replicate** (whole on every rank), **split** (cut along its last
dimension, features or heads) or **sequence** (cut along dimension 1, the tokens).
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from zerolab.schema.hints import hint
from zerolab.schema.section import NonNegativeInt, PositiveInt, Section, suggest

__all__ = [
    "STYLES",
    "LayerPlan",
    "PipelineConfig",
    "ScheduleName",
    "TensorParallelConfig",
    "layer_plan",
]

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
"""In which order micro-batches pass the stages of a pipeline."""


class PipelineConfig(Section):
    """How a ``PipelineModule`` runs; most is said where it is built."""

    stages: PositiveInt | None = None
    """Pipeline stages, which the ``PipelineModule`` must have; null takes what it has. Where it is
    said, batch sizes are checked before anything starts for the replicas that it leaves, and what
    does not go with pipeline stages is refused."""

    schedule: ScheduleName = "1f1b"
    """``1f1b``: each stage turns to backward as soon as it can; ``gpipe``: all forwards first;
    ``interleaved``: several chunks on each rank, for a smaller bubble; ``zero-bubble``: gradients
    of weights are made while a stage would wait."""

    activation_checkpoint_interval: NonNegativeInt = 0
    """Layers that are computed again in backward together; 0 takes what the ``PipelineModule``
    says. ``activation_checkpointing`` says where their inputs wait."""

    partition: str | None = hint(None, "partition_method is said where PipelineModule is built")
    """How layers are divided."""

    seed_layers: bool = hint(
        default=False, reason="seed_layers is said where PipelineModule is built"
    )
    """Seed each layer by its place."""

    use_reentrant: bool = hint(
        default=True, reason="activations are always computed again without reentering autograd"
    )
    """Which kind of activation checkpointing."""

    pipe_partitioned: bool = hint(default=True, reason="activations are sent whole")
    """Divide activations on their way over the tensor-parallel ranks."""

    grad_partitioned: bool = hint(default=True, reason="activations' gradients are sent whole")
    """Divide the gradients of activations on their way over the tensor-parallel ranks."""


Style = Literal["colwise", "rowwise", "sequence", "summed", "replicate"]
Layout = Literal["replicate", "split", "sequence"]


class LayerPlan(Section):
    """How one layer is cut."""

    style: Style
    """``colwise``: each rank has some of the outputs. ``rowwise``: some of the inputs.
    ``sequence``: whole, and computes each rank's tokens. ``summed``: whole, and computes what a
    rank has, so that its gradients are summed. ``replicate``: whole."""

    input: Layout | None = None
    """What it reads; null is what the style expects."""

    output: Layout | None = None
    """What it gives; null is what the style makes."""

    blocks: PositiveInt = 1
    """Matrices that lie in this one, one after the other, each of which is cut: 3 for query, key
    and value."""

    def __str__(self) -> str:
        """Say what is not the style's own."""
        more = {"input": self.input, "output": self.output, "blocks": self.blocks}
        said = [f", {key} {value}" for key, value in more.items() if value not in (None, 1)]
        return self.style + "".join(said)


STYLES: Mapping[str, Mapping[str, Any]] = {
    "colwise": {"style": "colwise"},
    "rowwise": {"style": "rowwise"},
    "sequence": {"style": "sequence"},
    "summed": {"style": "summed"},
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
}
"""Names of styles, and what each stands for."""


def layer_plan(given: Any) -> Any:
    """Write the name of a style out; anything else is left as it is.

    Raises:
        ValueError: If there is no such style.
    """
    if not isinstance(given, str):
        return given
    if given not in STYLES:
        known = ", ".join(sorted(STYLES))
        raise ValueError(f"must be one of {known}, got {given!r}{suggest(given, STYLES)}")
    return dict(STYLES[given])


class TensorParallelConfig(Section):
    """Cut the matrices of a model over ranks."""

    size: PositiveInt = 1
    """Ranks that have one model between them; the data-parallel ranks are the others' number: all
    ranks divided by this."""

    plan: Literal["auto"] | dict[str, LayerPlan] = "auto"
    """How each layer is cut, by a pattern of its name in which ``*`` stands for any part between
    two dots. ``auto``: the model's own, from its ``tensor_parallel_plan()`` or, of a Hugging Face
    model, its ``tp_plan``."""

    @field_validator("plan", mode="before")
    @classmethod
    def _written_out(cls, plan: Any) -> Any:
        if not isinstance(plan, Mapping):
            if plan != "auto":
                raise ValueError(f"must be 'auto' or map names of layers to styles, got {plan!r}")
            return plan
        found = {}
        for name, given in plan.items():
            try:
                found[name] = layer_plan(given)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return found
