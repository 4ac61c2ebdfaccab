"""Units of stage 3: modules whose parameters ``fully_shard`` gathers together.

A unit's parameters are gathered in one collective just before its forward, and freed after it.
Small units mean many collectives, large ones much memory. Units are chosen in this order:

1. the user's choice, by class name or by a function;
2. repeated blocks: two or more children of one class in a ``ModuleList``, a ``Sequential`` or a
   ``ModuleDict`` of numbers, such as the layers of a transformer;
3. any other module whose unclaimed parameters reach a threshold.

Everything else belongs to the root. Modules that share a weight with another unit are not units, so
tied weights are gathered with a module that contains both. Nothing inside attention and recurrent
modules becomes a unit: they read their children's weights without calling the children, so such a
unit would never be gathered. The same applies to the result of the model's ``read_by_others()``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zerolab.errors import ConfigError

WrapFunction = Callable[[nn.Module], Sequence[nn.Module]]
"""Function that gets the full model and returns the modules to gather separately."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Never units: they have no forward, or only call their children."""

LEAVES = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Modules that read their children's weights directly: full units, or none."""

LEAF_FLAG = "_z3_leaf"
"""DeepSpeed's attribute of a module to gather as one unit."""

DEFAULT_UNIT_NUMEL = 1_000_000
"""Smallest number of elements of a unit that is not a repeated block."""


@dataclass(frozen=True)
class Unit:
    """Parameters gathered in one collective.

    Attributes:
        name: Name in ``named_modules()``; empty for the root.
        module: Module whose forward needs the parameters.
        numel: Number of elements of the unit's parameters, without those of inner units.
        largest: Number of elements of the largest of these parameters.
    """

    name: str
    module: nn.Module
    numel: int
    largest: int


def plan_units(
    module: nn.Module,
    *,
    wrap: Collection[str] | WrapFunction | None = None,
    leaves: Collection[str] = (),
    unit_numel: int = DEFAULT_UNIT_NUMEL,
    apart: Collection[nn.Module] = (),
    ignored: Collection[nn.Parameter] = (),
) -> list[Unit]:
    """Divide a model into units, inner units before outer ones, the root last.

    Args:
        module: The full model, not yet sharded.
        wrap: Class names (``["Block"]``), or a function that selects modules; None to use the
            model's structure.
        leaves: Class names of modules that are gathered with everything inside of them, like
            modules marked by :data:`LEAF_FLAG`.
        unit_numel: Smallest number of elements of a separate unit.
        apart: Modules that are units in any case, because they compute in another type.
        ignored: Parameters that are not sharded.

    Returns:
        At least the root, which has the empty name.

    Raises:
        ConfigError: If ``wrap`` or ``leaves`` names a class that does not occur in the model, or
            ``wrap`` selects a module outside of it.
    """
    leaf_modules = _of_classes(module, leaves) | {
        part for part in module.modules() if is_leaf(part)
    }
    inside_leaves = {
        child for leaf in leaf_modules for child in leaf.modules() if child is not leaf
    }
    chosen = _by_choice(module, wrap) if wrap else _by_structure(module, leaf_modules, unit_numel)
    chosen = ((chosen | leaf_modules) - inside_leaves - _read_by_others(module) - {module}) | (
        set(apart) - {module}
    )
    chosen -= {child for child in chosen if isinstance(child, nn.ModuleList | nn.ModuleDict)}
    while sharing := _sharing(module, chosen):
        chosen -= sharing
    claimed = set(ignored)
    units = []
    for name, child in _bottom_up(module):
        if child in chosen or child is module:
            parameters = {p for p in child.parameters() if p not in claimed}
            claimed |= parameters
            if parameters or child is module:
                sizes = [p.numel() for p in parameters]
                units.append(Unit(name, child, sum(sizes), max(sizes, default=0)))
    return units


def requested_units(module: nn.Module) -> WrapFunction | None:
    """Return a function for the model's own choice of units; None without one.

    Args:
        module: Model that may have ``stage3_units()``, which returns the modules.
    """
    method = getattr(module, "stage3_units", None)
    return None if method is None else lambda _: method()


def _read_by_others(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights are read without calling them, as the model states."""
    method = getattr(module, "read_by_others", None)
    return set() if method is None else {inner for outer in method() for inner in outer.modules()}


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model, for recomputation and compilation.

    Returns:
        Names and modules: the repeated blocks; without any, the model's children that have
        parameters and a forward.
    """
    blocks: set[nn.Module] = set()
    _find_blocks(module, blocks)
    named_blocks = [(name, child) for name, child in module.named_modules() if child in blocks]
    if named_blocks:
        return named_blocks
    return [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_parameters(child)
    ]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _sharing(module: nn.Module, units: Collection[nn.Module]) -> set[nn.Module]:
    """Return units with a parameter that another unit, or the root, has, too."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner, holder in _modules_with_owners(module, units):
        for parameter in holder.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)
    return {
        owner for owning_units in owners.values() if len(owning_units) > 1 for owner in owning_units
    } - {module}


def _modules_with_owners(
    module: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Return an iterator over all modules by name, each with the innermost unit around it."""

    def walk(current: nn.Module, owner: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        owner = current if current in units else owner
        yield owner, current
        for child in current.children():
            yield from walk(child, owner)

    return walk(module, module)


def _bottom_up(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules with their names, each after all modules inside of it."""
    return sorted(module.named_modules(), key=lambda item: -_depth(item[0]))


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _by_choice(module: nn.Module, wrap: Collection[str] | WrapFunction) -> set[nn.Module]:
    if not callable(wrap):
        return _of_classes(module, wrap)
    picked = set(wrap(module))
    if strangers := picked - set(module.modules()):
        names = ", ".join(sorted(type(stranger).__name__ for stranger in strangers))
        problem = f"the wrapping function: must pick modules of the model, got others: {names}"
        raise ConfigError("stage 3", [problem])
    return picked


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is marked by :data:`LEAF_FLAG`."""
    return bool(vars(module).get(LEAF_FLAG, getattr(type(module), LEAF_FLAG, False)))


def is_class_of(module: nn.Module, cls: type | str) -> bool:
    """Return whether a module is an instance of a class, given as a class or by its name.

    module: Any module.
    cls: A class, which includes its subclasses; or the name of the module's class, with or
            without the name of the Python module.
    """
    if isinstance(cls, type):
        return isinstance(module, cls)
    kind = type(module)
    return cls in {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _of_classes(module: nn.Module, names: Collection[str]) -> set[nn.Module]:
    matches = {name: {m for m in module.modules() if is_class_of(m, name)} for name in names}
    if missing := sorted(name for name, modules in matches.items() if not modules):
        present = {type(child).__name__ for child in module.modules()}
        available = ", ".join(sorted(present - {container.__name__ for container in CONTAINERS}))
        raise ConfigError(
            "stage 3",
            [f"class {name!r}: not in the model, which has: {available}" for name in missing],
        )
    return set().union(*matches.values())


def _by_structure(module: nn.Module, leaves: set[nn.Module], unit_numel: int) -> set[nn.Module]:
    blocks = set(leaves)
    _find_blocks(module, blocks)
    large: set[nn.Module] = set()
    _find_large(module, blocks, large, unit_numel)
    return blocks | large


def _find_blocks(module: nn.Module, blocks: set[nn.Module]) -> None:
    """Collect the repeated blocks; the content of blocks and leaves is skipped."""
    if isinstance(module, LEAVES) or module in blocks:
        return
    children = list(module.children())
    kinds = [type(child) for child in children]
    listed = isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_numbered(module)
    for child in children:
        repeated = listed and kinds.count(type(child)) > 1 and not isinstance(child, CONTAINERS)
        if repeated and _has_parameters(child):
            blocks.add(child)
        else:
            _find_blocks(child, blocks)


def _is_numbered(module: nn.Module) -> bool:
    """Return whether it is a list with indices as names, such as a pipeline's layers."""
    return isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)


def _find_large(
    module: nn.Module, blocks: set[nn.Module], units: set[nn.Module], unit_numel: int
) -> int:
    """Collect large modules, children first; return the number of unclaimed elements."""
    if module in blocks:
        return 0
    unclaimed = sum(p.numel() for p in module.parameters(recurse=isinstance(module, LEAVES)))
    if not isinstance(module, LEAVES):
        unclaimed += sum(
            _find_large(child, blocks, units, unit_numel) for child in module.children()
        )
    if unclaimed < unit_numel or isinstance(module, CONTAINERS):
        return unclaimed
    units.add(module)
    return 0
