"""``deepspeed.utils.z3_leaf_module``: modules that stage 3 gathers as one unit."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from zerotrial.engine.module.units import LEAF_FLAG, is_class_of, is_leaf

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf."""
    return is_leaf(model)


def z3_leaf_parameter(model: Any) -> bool:
    """Return whether a parameter of an engine of stage 3 is in a module marked as a leaf."""
    return hasattr(model, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """List the modules of a model that are marked as leaves."""
    return [part for part in model.modules() if is_leaf(part)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:  # noqa: FBT001 - DeepSpeed's
    """Mark one module, or remove the mark; before ``initialize``."""
    setattr(model, LEAF_FLAG, flag)


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Collection[type | str],
    raise_if_not_found: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> list[nn.Module]:
    """Have stage 3 gather modules of some classes as one unit; call it before ``initialize``.

    Args:
        model: Its modules, and the model itself, are searched.
        leaf_module_classes: Classes, which include their subclasses; or class names, with or
            without the name of the Python module.
        raise_if_not_found: Raise an error where no module matches.

    Returns:
        The modules that match, children before parents.

    Raises:
        ValueError: Where no module matches.
        TypeError: For an entry that is neither a class nor text.

    Example:
        >>> set_z3_leaf_modules(model, ["transformers.models.mixtral.MixtralSparseMoeBlock"])
    """
    return _mark_classes(model, leaf_module_classes, raise_if_not_found, flag=True)


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Collection[type | str],
    raise_if_not_found: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> list[nn.Module]:
    """Undo :func:`set_z3_leaf_modules`; the same arguments and errors."""
    return _mark_classes(model, leaf_module_classes, raise_if_not_found, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Iterable[str],
    flag: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    raise_if_not_found: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in ``named_modules()``; call it before ``initialize``.

    Args:
        model: Its modules are searched.
        module_names: Full names, such as ``layers.0.mlp``.
        flag: False removes the mark.
        raise_if_not_found: Raise an error for names without a module.

    Returns:
        The modules, and the names without one.

    Raises:
        ValueError: For names without a module.
    """
    return _mark_names(model, module_names, str.__eq__, raise_if_not_found, flag=flag)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    raise_if_not_found: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names; see :func:`set_z3_leaf_modules_by_name`."""
    return _mark_names(model, module_name_suffixes, str.endswith, raise_if_not_found, flag=flag)


def _mark_classes(
    model: nn.Module,
    classes: Collection[type | str],
    raise_if_not_found: bool,  # noqa: FBT001 - as its callers
    *,
    flag: bool,
) -> list[nn.Module]:
    if isinstance(classes, (str, type)) or not all(isinstance(c, (str, type)) for c in classes):
        msg = f"leaf_module_classes: must be a list of classes or class names, got {classes!r}"
        raise TypeError(msg)
    leaves: list[nn.Module] = []

    def mark(part: nn.Module) -> None:
        if any(is_class_of(part, class_name) for class_name in classes):
            set_z3_leaf_module(part, flag)
            leaves.append(part)

    model.apply(mark)
    if not leaves and raise_if_not_found:
        raise ValueError(f"No modules of type {list(classes)} found in model {model}")
    return leaves


def _mark_names(
    model: nn.Module,
    class_names: Iterable[str],
    matches: Callable[[str, str], bool],
    raise_if_not_found: bool,  # noqa: FBT001 - as its callers
    *,
    flag: bool,
) -> tuple[list[nn.Module], list[str]]:
    leaves: dict[nn.Module, None] = {}
    missing = []
    for text in class_names:
        parts = [part for name, part in model.named_modules() if matches(name, text)]
        if not parts:
            missing.append(text)
        for part in parts:
            set_z3_leaf_module(part, flag)
            leaves[part] = None
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model {model}")
    return list(leaves), missing
