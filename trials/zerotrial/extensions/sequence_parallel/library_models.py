"""Causal models of Hugging Face's transformers on divided tokens.

The attention becomes a registered function that exchanges tokens for heads and calls the former
one. Each rank of the sequence axis reads the same micro-batch, and the model gets the rank's tokens
of it. Labels are shifted before they are divided, and the loss is divided by the labels of all
ranks, so that the mean of the ranks' losses is the loss of the full batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.sequence_parallel.attention import exchange

if TYPE_CHECKING:
    from zerotrial.engine.mesh import Axis

__all__ = ["divide_tokens"]

_KEY = "sequence_parallel_size"
_IGNORED = -100
_HEADS_FIRST, _TOKENS_FIRST = (1, 2), (1, 2)
"""Dimensions to divide and to gather: heads, tokens of a query; tokens, heads of a context."""

_DIVIDED = ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels")
_READ = (*_DIVIDED, "attention_mask", "num_items_in_batch", "use_cache", "return_dict")
_numbers = itertools.count()


def divide_tokens(module: Any, axis: Axis) -> Callable[[], None]:
    """Divide the attention and the batches of a model.

    Args:
        module: A causal model of transformers.
        axis: The sequence axis.

    Returns:
        Function that undoes it.

    Raises:
        ConfigError: If the model is of another kind.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if problems := _problems(module, axis.size):
        raise ConfigError(_KEY, problems)
    before = module.config._attn_implementation  # noqa: SLF001 - it has no public name
    attend = ALL_ATTENTION_FUNCTIONS["sdpa" if before in (None, "eager") else before]
    group: Any = axis.group

    def attention(
        part: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        inner = [exchange(x, group, *_HEADS_FIRST) for x in (query, key, value)]
        context, scores = attend(part, *inner, mask, **options)
        return exchange(context, group, *_TOKENS_FIRST), scores

    name = f"zerolab_sequence_parallel_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    module.set_attn_implementation(name)

    def divide(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args or (others := sorted(kwargs.keys() - set(_READ))):
            got = "positional arguments" if args else ", ".join(others)
            raise EngineError(
                f"{_KEY}: the arguments of the model must be named, and among "
                f"{', '.join(_READ)}; got {got}"
            )
        return args, _divided(kwargs, axis)

    hook = module.register_forward_pre_hook(divide, with_kwargs=True)

    def undo() -> None:
        hook.remove()
        module.set_attn_implementation(before)

    return undo


def _problems(module: Any, ranks: int) -> list[str]:
    config = module.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    name = type(module).__name__
    problems = []
    if not name.endswith("ForCausalLM") or not getattr(
        module, "_supports_attention_backend", False
    ):
        problems.append(
            f"must be 1 for {name}: only causal models (...ForCausalLM) whose attention can be "
            "replaced have their tokens divided"
        )
    if getattr(config, "sliding_window", None) is not None or kinds != {"full_attention"}:
        problems.append(
            f"must be 1 for {name}, which has layers without full attention; if no sequence is "
            "longer than the window, set config.sliding_window to None"
        )
    if getattr(config, "output_router_logits", False):
        problems.append(
            "must be 1 with config.output_router_logits, because the auxiliary loss of experts "
            "needs all tokens; set it to False"
        )
    if heads % ranks or key_heads % ranks:
        problems.append(
            f"must divide the numbers of attention heads and of key-value heads, {heads} and "
            f"{key_heads}, got {ranks}"
        )
    return problems


def _divided(kwargs: Mapping[str, Any], axis: Axis) -> dict[str, Any]:
    """Return this rank's tokens of the arguments."""
    batch = dict(kwargs)
    given = next(batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None)
    tokens = given.shape[1]
    if tokens % axis.size:
        raise EngineError(
            f"{_KEY}: must divide the number of tokens, {tokens}, got {axis.size}; pad the batch "
            "on the right"
        )
    mask = batch.pop("attention_mask", None)
    # In a causal model, tokens see no padding that follows them.
    if mask is not None and (mask.dim() != 2 or bool((mask.long().diff(dim=1) > 0).any())):
        raise EngineError(
            f"{_KEY}: attention_mask must have the shape (batch, tokens), with the padding on the "
            "right; set tokenizer.padding_side to 'right'"
        )
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(tokens, device=given.device)[None]
    labels = batch.get("labels")
    if labels is not None:
        if batch.get("shift_labels") is None:
            batch["shift_labels"] = functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
        count = batch.get("num_items_in_batch")
        if count is None:
            count = (batch["shift_labels"] != _IGNORED).sum()
        batch["num_items_in_batch"] = count / axis.size
    part = tokens // axis.size
    for key in _DIVIDED:
        if batch.get(key) is not None:
            batch[key] = batch[key].narrow(1, axis.rank * part, part).contiguous()
    batch["use_cache"] = False
    return batch
