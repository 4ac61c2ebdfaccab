"""Layers of a pipeline: specifications that are built on the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerolab.errors import ConfigError

__all__ = [
    "Layer",
    "LayerSpec",
    "TiedLayerSpec",
    "check_layers",
    "name_of",
    "numel_of",
    "shared_problems",
]


class LayerSpec:
    """Layer that is built only on the ranks that run it.

    Args:
        typename: An ``nn.Module`` class, or a callable that returns a layer.
        module_args: Its arguments.
        module_kwargs: Its keyword arguments.

    Raises:
        ConfigError: If it is not callable.

    Example:
        >>> zerotrial.LayerSpec(torch.nn.Linear, 4, 1, bias=False).build()
        Linear(in_features=4, out_features=1, bias=False)
    """

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any):
        if not callable(typename):
            kind = type(typename).__name__
            raise ConfigError(
                "LayerSpec()", [f"typename: must be a class of torch.nn.Module, got {kind}"]
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> Any:
        """Build the layer on this rank.

        Returns:
            Result of the class or callable.

        Example:
            >>> zerotrial.LayerSpec(torch.nn.ReLU).build()
            ReLU()
        """
        return self.typename(*self.module_args, **self.module_kwargs)

    @property
    def name(self) -> str:
        """Name of the class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        """Return the specification as source text."""
        arguments = [repr(value) for value in self.module_args]
        arguments += [f"{key}={value!r}" for key, value in self.module_kwargs.items()]
        return f"{self.name}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """Layer that occurs several times in the model with the same parameters.

    Every stage that has it keeps a copy. Their gradients are added, so that the copies stay equal.
    All parameters of the layer are shared.

    Args:
        key: Layers with the same key are tied.
        typename: See :class:`LayerSpec`; the first one of a key is built.
        module_args: Its arguments.
        forward_fn: Called with the layer and its input instead of the layer.
        tied_weight_attr: Weights that DeepSpeed shares; the layer must have them.
        module_kwargs: Its keyword arguments.

    Example:
        >>> def logits(embedding, hidden):
        ...     return hidden @ embedding.weight.T
        >>> layers = [
        ...     zerotrial.TiedLayerSpec("embedding", torch.nn.Embedding, 100, 8),
        ...     zerotrial.LayerSpec(torch.nn.Linear, 8, 8),
        ...     zerotrial.TiedLayerSpec("embedding", torch.nn.Embedding, 100, 8, forward_fn=logits),
        ... ]
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ):
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )

    def build(self) -> Any:
        """Build the layer and check the weights to tie.

        Returns:
            Result of the class or callable.

        Raises:
            ConfigError: If it lacks a weight to tie.

        Example:
            >>> zerotrial.TiedLayerSpec("embedding", torch.nn.Embedding, 100, 8).build()
            Embedding(100, 8)
        """
        layer = super().build()
        for dotted in self.tied_weight_attr:
            value = layer
            for part in dotted.split("."):
                value = getattr(value, part, None)
            if not isinstance(value, torch.Tensor):
                problem = f"tied_weight_attr: {self.name} must have a weight {dotted!r}, has none"
                raise ConfigError(f"TiedLayerSpec({self.key!r})", [problem])
        return layer


Layer = LayerSpec | nn.Module | Callable[[Any], Any]
"""Elements of a pipeline; a function has no parameters."""


def check_layers(layers: Any) -> list[Layer]:
    """Return the layers as a list.

    Raises:
        ConfigError: If one is neither a specification, a module nor callable, or if two share a
            parameter.
    """
    items = None
    if isinstance(layers, Iterable) and not isinstance(layers, str | bytes | Mapping):
        items = list(layers)
    problems = []
    if not items:
        problems.append("layers: must be a list of LayerSpec, torch.nn.Module or functions")
    for index, layer in enumerate(items or ()):
        if isinstance(layer, type):
            problems.append(
                f"layers[{index}]: is the class {layer.__name__}; write LayerSpec({layer.__name__})"
            )
        elif not isinstance(layer, LayerSpec) and not callable(layer):
            problems.append(
                f"layers[{index}]: must be a LayerSpec, torch.nn.Module or function, got "
                f"{type(layer).__name__}"
            )
    indexed = enumerate(items or ())
    problems += shared_problems(
        (index_, layer) for index_, layer in indexed if isinstance(layer, nn.Module)
    )
    if problems:
        raise ConfigError("PipelineModule()", problems)
    assert items is not None
    return items


def shared_problems(modules: Iterable[tuple[int, nn.Module]]) -> list[str]:
    """Return the problems of layers that share a trained parameter, one line per pair.

    On two pipeline stages it would become two parameters. Frozen parameters may be shared.

    Args:
        modules: Layers with their indices in the model.
    """
    seen: dict[int, tuple[int, str]] = {}
    problems: dict[tuple[int, int], str] = {}
    for index, module in modules:
        for name, parameter in module.named_parameters():
            other, other_name = seen.setdefault(id(parameter), (index, name))
            if other != index and parameter.requires_grad:
                problems.setdefault(
                    (other, index),
                    f"layers[{index}]: must not share parameters, got {name}, which is "
                    f"{other_name} of layers[{other}], too, and would be a separate parameter on "
                    "another pipeline stage; "
                    "tie the layers: use TiedLayerSpec with one key for both, and forward_fn "
                    "if one of them is called differently",
                )
    return list(problems.values())


def name_of(layer: Layer) -> str:
    """Return the name of a layer's class, or of the function."""
    if isinstance(layer, LayerSpec):
        return layer.name
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def numel_of(layer: Layer) -> int:
    """Return the number of trained parameters of a layer, built on the meta device if possible."""
    if isinstance(layer, LayerSpec):
        built = _build_on_meta(layer)
        return numel_of(built) if isinstance(built, nn.Module) else 0
    if isinstance(layer, nn.Module):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return 0


def _build_on_meta(spec: LayerSpec) -> Any:
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return spec.build()
        except (NotImplementedError, RuntimeError):  # it computes with values
            return spec.build()
