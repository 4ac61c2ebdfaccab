"""Validation of a plan against a model, and shard specs of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from zerotrial.engine.comm.ranks import GroupRanks
from zerotrial.engine.mesh import tie_of
from zerotrial.engine.module.shard_spec import ShardSpec
from zerotrial.extensions.tensor_parallel.experts import experts_problem
from zerotrial.extensions.tensor_parallel.plan import Layer

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import LayerPlan
    from zerotrial.engine.mesh import Axis

__all__ = [
    "Stages",
    "cuts_of",
    "differently_sharded_ties",
    "indivisible_heads",
    "is_transposed",
    "layouts_of",
    "tied_embeddings",
    "undeclared_blocks",
    "unplanned_users",
]

_READS = {"colwise": "replicate", "rowwise": "split", "sequence": "sequence"}
_GIVES = {"colwise": "split", "rowwise": "replicate", "sequence": "sequence"}


def cuts_of(
    layer: Layer, axis: Axis, problems: list[str]
) -> Iterator[tuple[nn.Parameter, ShardSpec]]:
    """Yield the sharded parameters of one layer; add problems to ``problems``."""
    module, plan = layer.module, layer.plan
    problem = _layer_problem(layer, axis.size)
    if problem is not None:
        problems.append(f"{layer.name}: {problem}")
        return
    for name, dim in _dims(module, plan).items():
        parameter = getattr(module, name, None)
        if parameter is None:
            continue
        length = parameter.shape[dim]
        if length % (axis.size * plan.blocks):
            kind = "vocabulary" if isinstance(module, nn.Embedding) and dim == 0 else "matrix"
            blocks = f" x {plan.blocks} blocks" if plan.blocks > 1 else ""
            problems.append(
                f"{layer.name}: {name} must be a multiple of {axis.size} ranks{blocks} long in "
                f"dimension {dim}, got {length}; pad the {kind}, or choose another "
                "tensor_parallel.size"
            )
            continue
        yield parameter, ShardSpec(parameter.shape, dim, axis.rank, axis.size, plan.blocks)


def _layer_problem(layer: Layer, size: int) -> str | None:
    module, plan = layer.module, layer.plan
    if any(parameter.is_meta for parameter in module.parameters()):
        return "must hold values, got the meta device"
    if plan.style in ("colwise", "rowwise"):
        problem = _sharding_problem(module, plan)
    elif plan.style == "experts" and plan.blocks == 1:
        problem = experts_problem(module, size)
    else:
        problem = "blocks: must be 1 without sharding" if plan.blocks > 1 else None
    return problem or _layout_problem(layer)


def _sharding_problem(module: nn.Module, plan: LayerPlan) -> str | None:
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "max_norm, sparse and scale_grad_by_freq must be off in an embedding"
        return "blocks: must be 1 in an embedding" if plan.blocks > 1 else None
    if isinstance(module, nn.Linear) or is_transposed(module):
        return None
    return (
        f"only nn.Linear and nn.Embedding can be sharded, got {type(module).__name__}; name "
        "the layers inside it, or give each a plan"
    )


def _layout_problem(layer: Layer) -> str | None:
    """Return the problem of a sharded layer's input or output layout."""
    style = layer.plan.style
    allowed = {
        "colwise": (("replicate", "sequence"), ("split", "replicate")),
        "rowwise": (("split", "replicate"), ("replicate", "sequence")),
        "experts": (("replicate",), ("replicate",)),
    }
    for which, layout, supported in zip(
        ("input", "output"), layouts_of(layer), allowed.get(style, ()), strict=False
    ):
        if layout not in supported:
            return f"{which}: must be {' or '.join(supported)} with style {style}, got {layout}"
    return None


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dims(module: nn.Module, plan: LayerPlan) -> dict[str, int]:
    """Return the sharded parameters of a layer, with their dimensions."""
    if plan.style == "colwise":
        if isinstance(module, nn.Embedding):
            return {"weight": 1}
        return {"weight": 1 if is_transposed(module) else 0, "bias": 0}
    if plan.style == "rowwise":
        if isinstance(module, nn.Embedding):
            return {"weight": 0}
        return {"weight": 0 if is_transposed(module) else 1}
    if plan.style == "experts":
        return {name: 0 for name, _ in module.named_parameters(recurse=False)}
    return {}


def undeclared_blocks(layers: list[Layer]) -> Iterator[str]:
    """Find matrices that may contain query, key and value, without ``blocks`` in the plan.

    Sharded as one, a rank would have all of the query and some of the key, for instance: the
    result would be wrong without an error. A library's plan is trusted.
    """
    names = [
        layer.name
        for layer in layers
        if layer.plan.style == "colwise"
        and not layer.of_library
        and "blocks" not in layer.plan.model_fields_set
        and _is_threefold(layer.module)
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"tensor_parallel.plan: {names[0]}{more}: three times as many outputs as inputs, "
            'sharded as one; for query, key and value in one matrix set "blocks": 3, otherwise '
            'set "blocks": 1'
        )


def _is_threefold(module: nn.Module) -> bool:
    """Return whether a linear layer has three times as many outputs as inputs."""
    if isinstance(module, nn.Linear):
        return module.out_features == 3 * module.in_features
    if not is_transposed(module):
        return False
    weight = module.get_parameter("weight")  # (inputs, outputs)
    return weight.shape[1] == 3 * weight.shape[0]


def tied_embeddings(module: nn.Module, layers: list[Layer]) -> list[Layer]:
    """Return embeddings without a plan whose vocabulary a planned layer shards: they follow."""
    heads = {
        getattr(layer.module, "weight", None)
        for layer in layers
        if layer.plan.style == "colwise" and isinstance(layer.module, nn.Linear)
    }
    named = {layer.module for layer in layers}
    follow = type(layers[0].plan)(style="rowwise") if layers else None
    return [
        Layer(name, part, follow)
        for name, part in module.named_modules()
        if follow is not None
        and isinstance(part, nn.Embedding)
        and part not in named
        and part.weight in heads
    ]


def unplanned_users(
    module: nn.Module,
    layers: list[Layer],
    cuts: Mapping[nn.Parameter, ShardSpec],
    names: Mapping[nn.Parameter, str],
) -> Iterator[str]:
    """Find modules without a plan that share a sharded parameter: they would read a part."""
    planned = {layer.module for layer in layers}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            if parameter in cuts and part not in planned:
                yield f"{name}: shares {names[parameter]}, which is cut; give it a plan too"


def differently_sharded_ties(
    module: nn.Module,
    cuts: Mapping[nn.Parameter, ShardSpec],
    names: Mapping[nn.Parameter, str],
    stages: Stages,
) -> list[str]:
    """Find weights shared by pipeline stages but sharded differently. **Collective**."""
    local = {}
    for parameter in module.parameters():
        tie, cut = tie_of(parameter), cuts.get(parameter)
        if tie is not None:
            local[tie.key] = (names[parameter], None if cut is None else cut.dim)
    by_stage = stages.allgather(local)
    return [
        f"{name}: must be cut as {other} is, which is the same weight on another pipeline stage; "
        "name both in the plan (an embedding 'rowwise', a head 'colwise')"
        for key, (name, dim) in local.items()
        for other, other_dim in [stage_ties[key] for stage_ties in by_stage if key in stage_ties]
        if other_dim != dim
    ]


class Stages(GroupRanks):
    """Pipeline stages, each with different layers."""

    def union(self, local: set[str]) -> set[str]:
        """Merge the sets of all stages. **Collective**."""
        return set().union(*self.allgather(local))


def indivisible_heads(module: nn.Module, size: int) -> Iterator[str]:
    """Find a library model whose number of heads is not divisible by the ranks."""
    config = getattr(module, "config", None)
    config = getattr(config, "text_config", config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            yield f"size: must divide the model's {name}, got {size} with {heads} heads"


def layouts_of(layer: Layer) -> tuple[str, str]:
    """Return the input and output layout of a layer."""
    style = layer.plan.style
    reads = layer.plan.input or _READS.get(style, "replicate")
    if isinstance(layer.module, nn.Embedding) and layer.plan.input is None:
        reads = "replicate"  # token numbers
    return reads, layer.plan.output or _GIVES.get(style, "replicate")
