"""Which parameters of a layer are cut and how, and whether a plan fits a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from zerotrial.engine.comm.ranks import GroupRanks
from zerotrial.engine.mesh import tie_of
from zerotrial.engine.tensor.plan import Layer
from zerotrial.engine.tensor.shard_spec import Cut

if TYPE_CHECKING:
    from zerolab.config.engine.parallel import LayerPlan
    from zerotrial.engine.mesh import Axis

__all__ = [
    "Stages",
    "cuts_of",
    "heads_that_do_not_fit",
    "is_transposed",
    "layouts_of",
    "other_users",
    "tied_to_cut",
    "ties_cut_otherwise",
    "unsaid_blocks",
]

_READS = {"colwise": "replicate", "rowwise": "split", "sequence": "sequence"}
_GIVES = {"colwise": "split", "rowwise": "replicate", "sequence": "sequence"}


def cuts_of(layer: Layer, axis: Axis, problems: list[str]) -> Iterator[tuple[nn.Parameter, Cut]]:
    """Yield the parameters of one layer that are cut; what cannot be goes to ``problems``."""
    module, plan = layer.module, layer.plan
    problem = _unusable(layer)
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
        yield parameter, Cut(parameter.shape, dim, axis.rank, axis.size, plan.blocks)


def _unusable(layer: Layer) -> str | None:
    module, plan = layer.module, layer.plan
    if any(parameter.is_meta for parameter in module.parameters()):
        return "must hold values, got the meta device"
    if plan.style in ("colwise", "rowwise"):
        problem = _uncuttable(module, plan)
    else:
        problem = "blocks: must be 1 where nothing is cut" if plan.blocks > 1 else None
    return problem or _unreadable(layer)


def _uncuttable(module: nn.Module, plan: LayerPlan) -> str | None:
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return "max_norm, sparse and scale_grad_by_freq must be off in an embedding"
        return "blocks: must be 1 in an embedding" if plan.blocks > 1 else None
    if isinstance(module, nn.Linear) or is_transposed(module):
        return None
    return (
        f"only nn.Linear and nn.Embedding can be cut, got {type(module).__name__}; name the layers "
        "inside of it, or give them a plan of their own"
    )


def _unreadable(layer: Layer) -> str | None:
    """What is wrong with what a cut layer is to read and give."""
    style = layer.plan.style
    allowed = {
        "colwise": (("replicate", "sequence"), ("split", "replicate")),
        "rowwise": (("split", "replicate"), ("replicate", "sequence")),
    }
    for which, layout, known in zip(
        ("input", "output"), layouts_of(layer), allowed.get(style, ()), strict=False
    ):
        if layout not in known:
            return f"{which}: must be {' or '.join(known)} of a {style} layer, got {layout}"
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2's library, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _dims(module: nn.Module, plan: LayerPlan) -> dict[str, int]:
    """Parameters of a layer that are cut, and along which dimension."""
    if plan.style == "colwise":
        if isinstance(module, nn.Embedding):
            return {"weight": 1}
        return {"weight": 1 if is_transposed(module) else 0, "bias": 0}
    if plan.style == "rowwise":
        if isinstance(module, nn.Embedding):
            return {"weight": 0}
        return {"weight": 0 if is_transposed(module) else 1}
    return {}


def unsaid_blocks(layers: list[Layer]) -> Iterator[str]:
    """Find what may be query, key and value in one matrix, of which nobody has said so.

    Cut in one, a rank would have all of the query and some of the key, say: the sums go on, and
    are others. A library's own plan is believed.
    """
    found = [
        layer.name
        for layer in layers
        if layer.plan.style == "colwise"
        and not layer.of_library
        and "blocks" not in layer.plan.model_fields_set
        and _is_threefold(layer.module)
    ]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield (
            f"tensor_parallel.plan: {found[0]}{more}: three times as many outputs as inputs, cut "
            'as one; where query, key and value lie one after the other say "blocks": 3, and where '
            'nothing does "blocks": 1'
        )


def _is_threefold(module: nn.Module) -> bool:
    """Whether a linear layer gives three times as many features as it reads."""
    if isinstance(module, nn.Linear):
        return module.out_features == 3 * module.in_features
    if not is_transposed(module):
        return False
    weight = module.get_parameter("weight")  # (inputs, outputs)
    return weight.shape[1] == 3 * weight.shape[0]


def tied_to_cut(module: nn.Module, layers: list[Layer]) -> list[Layer]:
    """Embeddings that the plan leaves out, whose vocabulary a layer of it cuts: they follow."""
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


def other_users(
    module: nn.Module,
    layers: list[Layer],
    cuts: Mapping[nn.Parameter, Cut],
    names: Mapping[nn.Parameter, str],
) -> Iterator[str]:
    """Find modules that have a cut parameter and no plan: they would read a part for the whole."""
    planned = {layer.module for layer in layers}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            if parameter in cuts and part not in planned:
                yield f"{name}: shares {names[parameter]}, which is cut; give it a plan too"


def ties_cut_otherwise(
    module: nn.Module,
    cuts: Mapping[nn.Parameter, Cut],
    names: Mapping[nn.Parameter, str],
    stages: Stages,
) -> list[str]:
    """Find weights that pipeline stages share, and cut in different ways. **Collective**."""
    own = {}
    for parameter in module.parameters():
        tie, cut = tie_of(parameter), cuts.get(parameter)
        if tie is not None:
            own[tie.key] = (names[parameter], None if cut is None else cut.dim)
    everyone = stages.allgather(own)
    return [
        f"{name}: must be cut as {other} is, which is the same weight on another pipeline stage; "
        "name both in the plan (an embedding 'rowwise', a head 'colwise')"
        for key, (name, dim) in own.items()
        for other, other_dim in [found[key] for found in everyone if key in found]
        if other_dim != dim
    ]


class Stages(GroupRanks):
    """The pipeline stages, of which each has layers of its own."""

    def union(self, own: set[str]) -> set[str]:
        """Put together what all have. **Collective**."""
        return set().union(*self.allgather(own))


def heads_that_do_not_fit(module: nn.Module, size: int) -> Iterator[str]:
    """Find a library's model whose heads the ranks cannot share out."""
    config = getattr(module, "config", None)
    config = getattr(config, "text_config", config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            yield f"size: must divide the model's {name}, got {size} with {heads} heads"


def layouts_of(layer: Layer) -> tuple[str, str]:
    """Return what a layer reads and what it gives."""
    style = layer.plan.style
    reads = layer.plan.input or _READS.get(style, "replicate")
    if isinstance(layer.module, nn.Embedding) and layer.plan.input is None:
        reads = "replicate"  # token numbers
    return reads, layer.plan.output or _GIVES.get(style, "replicate")
