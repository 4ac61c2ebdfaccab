"""The layers of a pipeline: described first, and built where they are to run."""

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
    """A layer that is built on the ranks that run it, and nowhere else.

    Args:
        typename: An ``nn.Module`` class, or anything that makes a layer when it is called.
        module_args: For it.
        module_kwargs: For it.

    Raises:
        ConfigError: If it cannot be called.
    """

    def __init__(self, typename: Callable[..., Any], *module_args: Any, **module_kwargs: Any):
        if not callable(typename):
            found = type(typename).__name__
            raise ConfigError(
                "LayerSpec()", [f"typename: must be a class of torch.nn.Module, got {found}"]
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> Any:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    @property
    def name(self) -> str:
        """Of the class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def __repr__(self) -> str:
        """Say it as it was written."""
        arguments = [repr(value) for value in self.module_args]
        arguments += [f"{key}={value!r}" for key, value in self.module_kwargs.items()]
        return f"{self.name}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that stands in several places of the model, and is one and the same in all.

    Every stage that has it keeps a copy. Their gradients are added, so that the copies stay equal.
    All parameters of the layer are shared.

    Args:
        key: Layers of one key are one.
        typename: As in :class:`LayerSpec`; the first of a key is built.
        module_args: For it.
        forward_fn: What is called with the layer and its input, in place of the layer.
        tied_weight_attr: Weights which DeepSpeed shares; the layer must have them.
        module_kwargs: For the layer.
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
        """Make the layer.

        Raises:
            ConfigError: If it has not the weights that are to be tied.
        """
        layer = super().build()
        for dotted in self.tied_weight_attr:
            found = layer
            for part in dotted.split("."):
                found = getattr(found, part, None)
            if not isinstance(found, torch.Tensor):
                problem = f"tied_weight_attr: {self.name} must have a weight {dotted!r}, has none"
                raise ConfigError(f"TiedLayerSpec({self.key!r})", [problem])
        return layer


Layer = LayerSpec | nn.Module | Callable[[Any], Any]
"""What a pipeline may be made of; a function has no parameters."""


def check_layers(layers: Any) -> list[Layer]:
    """Return the layers as a list.

    Raises:
        ConfigError: If one is neither a specification, nor a module, nor callable; if two have a
            parameter in common.
    """
    found = None
    if isinstance(layers, Iterable) and not isinstance(layers, str | bytes | Mapping):
        found = list(layers)
    problems = []
    if not found:
        problems.append("layers: must be a list of LayerSpec, torch.nn.Module or functions")
    for index, layer in enumerate(found or ()):
        if isinstance(layer, type):
            problems.append(
                f"layers[{index}]: is the class {layer.__name__}; write LayerSpec({layer.__name__})"
            )
        elif not isinstance(layer, LayerSpec) and not callable(layer):
            problems.append(
                f"layers[{index}]: must be a LayerSpec, torch.nn.Module or function, got "
                f"{type(layer).__name__}"
            )
    given = enumerate(found or ())
    problems += shared_problems((at, layer) for at, layer in given if isinstance(layer, nn.Module))
    if problems:
        raise ConfigError("PipelineModule()", problems)
    assert found is not None
    return found


def shared_problems(modules: Iterable[tuple[int, nn.Module]]) -> list[str]:
    """Say which layers have a trained parameter in common, one line for each two of them.

    On two pipeline stages it would be two. What is not trained is the same on all of them.

    Args:
        modules: Layers, with their places in the model.
    """
    seen: dict[int, tuple[int, str]] = {}
    found: dict[tuple[int, int], str] = {}
    for place, module in modules:
        for name, parameter in module.named_parameters():
            before, its = seen.setdefault(id(parameter), (place, name))
            if before != place and parameter.requires_grad:
                found.setdefault(
                    (before, place),
                    f"layers[{place}]: must have parameters of its own, got {name}, which is {its} "
                    f"of layers[{before}] too, and would be another one on another pipeline stage; "
                    "tie the layers: TiedLayerSpec of one key at both places, with forward_fn "
                    "where it is called in another way",
                )
    return list(found.values())


def name_of(layer: Layer) -> str:
    """Name of a layer's class, or of the function."""
    if isinstance(layer, LayerSpec):
        return layer.name
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))


def numel_of(layer: Layer) -> int:
    """Count the trained parameters of a layer, without memory for them where that can be."""
    if isinstance(layer, LayerSpec):
        built = _without_memory(layer)
        return numel_of(built) if isinstance(built, nn.Module) else 0
    if isinstance(layer, nn.Module):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return 0


def _without_memory(spec: LayerSpec) -> Any:
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return spec.build()
        except (NotImplementedError, RuntimeError):  # computes with values, which meta has not
            return spec.build()
