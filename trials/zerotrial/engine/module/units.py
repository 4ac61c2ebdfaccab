"""Which modules stage 3 gathers together: the units of ``fully_shard``.

A unit's parameters are gathered just before its forward and freed after it, in one collective.
Small units mean many collectives, large ones much memory held at once. Chosen in this order:

1. the user's own choice, by class name or by a function;
2. repeated blocks: two or more children of one class in a ``ModuleList``, a ``Sequential`` or a
   ``ModuleDict`` of numbers, as the layers of a transformer are;
3. any other module whose own, not yet claimed parameters reach a threshold.

Whatever no unit claims stays with the root. Modules that share a weight with another unit are not
units themselves, so that tied weights are gathered together, with what contains both. Nothing
inside attention and recurrent modules becomes a unit: those read their children's weights without
calling the children, so that a unit there would never be gathered. Nor does what the model's
``read_by_others()`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zerolab.errors import ConfigError

WrapFunction = Callable[[nn.Module], Sequence[nn.Module]]
"""Given the whole model, returns the modules to gather one by one."""

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Never units themselves: they have no forward of their own, or only pass through it."""

LEAVES = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Modules that use their children's weights directly: units as a whole, or not at all."""

LEAF_FLAG = "_z3_leaf"
"""DeepSpeed's attribute that marks a module to be gathered as one unit."""

DEFAULT_UNIT_NUMEL = 1_000_000
"""Elements from which on a module that is not one of several alike is worth its own unit."""


@dataclass(frozen=True)
class Unit:
    """Parameters gathered in one collective.

    Attributes:
        name: Of the module, as in ``named_modules()``; empty for the root.
        module: Its forward is when the parameters are needed.
        numel: Elements of the parameters that are gathered with it; those of units inside it are
            not among them.
        largest: Elements of the largest of these parameters.
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
    """Divide a model into units, inner ones before those that contain them, the root last.

    Args:
        module: The whole model, not yet sharded.
        wrap: Class names (``["Block"]``), or a function that picks modules; None to let the
            structure decide.
        leaves: Class names of modules that are gathered whole, with all that is inside them.
            Modules marked by :data:`LEAF_FLAG` are gathered whole too.
        unit_numel: Elements from which on a module becomes a unit of its own.
        apart: Modules that are units wherever they stand, since they compute in another type.
        ignored: Parameters that are not sharded at all.

    Returns:
        At least the root, which has the empty name.

    Raises:
        ConfigError: If ``wrap`` or ``leaves`` names a class that is nowhere in the model, or
            ``wrap`` picks a module that is not part of it.
    """
    whole = _of_classes(module, leaves) | {part for part in module.modules() if is_leaf(part)}
    inside = {child for leaf in whole for child in leaf.modules() if child is not leaf}
    chosen = _by_choice(module, wrap) if wrap else _by_structure(module, whole, unit_numel)
    chosen = ((chosen | whole) - inside - _read_by_others(module) - {module}) | (
        set(apart) - {module}
    )
    chosen -= {child for child in chosen if isinstance(child, nn.ModuleList | nn.ModuleDict)}
    while sharing := _sharing(module, chosen):
        chosen -= sharing
    claimed = set(ignored)
    units = []
    for name, child in _bottom_up(module):
        if child in chosen or child is module:
            own = {p for p in child.parameters() if p not in claimed}
            claimed |= own
            if own or child is module:
                sizes = [p.numel() for p in own]
                units.append(Unit(name, child, sum(sizes), max(sizes, default=0)))
    return units


def asked_units(module: nn.Module) -> WrapFunction | None:
    """Find the modules that a model wants to have gathered one by one; None leaves it to us.

    Args:
        module: May have ``stage3_units()``, which returns them.
    """
    ask = getattr(module, "stage3_units", None)
    return None if ask is None else lambda _: ask()


def _read_by_others(module: nn.Module) -> set[nn.Module]:
    """Modules whose weights are read without calling them, as the model says."""
    ask = getattr(module, "read_by_others", None)
    return set() if ask is None else {inner for each in ask() for inner in each.modules()}


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the parts into which a model divides itself, for recomputation and compilation.

    Args:
        module: The whole model.

    Returns:
        Names and modules: the repeated blocks; where there are none, the model's own children
        that have parameters and a forward.
    """
    blocks: set[nn.Module] = set()
    _find_blocks(module, blocks)
    found = [(name, child) for name, child in module.named_modules() if child in blocks]
    if found:
        return found
    return [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) and _has_parameters(child)
    ]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _sharing(module: nn.Module, units: Collection[nn.Module]) -> set[nn.Module]:
    """Units that hold a parameter which another unit, or the root, holds too."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner, holder in _holders(module, units):
        for parameter in holder.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(owner)
    return {owner for found in owners.values() if len(found) > 1 for owner in found} - {module}


def _holders(
    module: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module, as often as it has names, with the innermost unit around it."""

    def walk(current: nn.Module, owner: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        owner = current if current in units else owner
        yield owner, current
        for child in current.children():
            yield from walk(child, owner)

    return walk(module, module)


def _bottom_up(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules with their names, every one after all that it contains."""
    return sorted(module.named_modules(), key=lambda item: -_depth(item[0]))


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _by_choice(module: nn.Module, wrap: Collection[str] | WrapFunction) -> set[nn.Module]:
    if not callable(wrap):
        return _of_classes(module, wrap)
    picked = set(wrap(module))
    if strangers := picked - set(module.modules()):
        found = ", ".join(sorted(type(stranger).__name__ for stranger in strangers))
        problem = f"the wrapping function: must pick modules of the model, got others: {found}"
        raise ConfigError("stage 3", [problem])
    return picked


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module is marked by :data:`LEAF_FLAG`."""
    return bool(vars(module).get(LEAF_FLAG, getattr(type(module), LEAF_FLAG, False)))


def is_class_of(module: nn.Module, wanted: type | str) -> bool:
    """Return whether a module is an instance of a class, given as a class or by its name.

    Args:
        module: Any.
        wanted: A class, which includes its subclasses; or the name of the module's own class, with
            or without the name of the Python module.
    """
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _of_classes(module: nn.Module, names: Collection[str]) -> set[nn.Module]:
    matches = {name: {m for m in module.modules() if is_class_of(m, name)} for name in names}
    if missing := sorted(name for name, modules in matches.items() if not modules):
        present = {type(child).__name__ for child in module.modules()}
        known = ", ".join(sorted(present - {container.__name__ for container in CONTAINERS}))
        raise ConfigError(
            "stage 3",
            [f"class {name!r}: not in the model, which has: {known}" for name in missing],
        )
    return set().union(*matches.values())


def _by_structure(module: nn.Module, leaves: set[nn.Module], unit_numel: int) -> set[nn.Module]:
    blocks = set(leaves)
    _find_blocks(module, blocks)
    large: set[nn.Module] = set()
    _find_large(module, blocks, large, unit_numel)
    return blocks | large


def _find_blocks(module: nn.Module, found: set[nn.Module]) -> None:
    """Collect the repeated blocks; what is inside a block or a leaf is not looked at."""
    if isinstance(module, LEAVES) or module in found:
        return
    children = list(module.children())
    kinds = [type(child) for child in children]
    listed = isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_numbered(module)
    for child in children:
        repeated = listed and kinds.count(type(child)) > 1 and not isinstance(child, CONTAINERS)
        if repeated and _has_parameters(child):
            found.add(child)
        else:
            _find_blocks(child, found)


def _is_numbered(module: nn.Module) -> bool:
    """Whether it is a list under the names of places, as a pipeline's layers are."""
    return isinstance(module, nn.ModuleDict) and all(name.isdigit() for name in module)


def _find_large(
    module: nn.Module, blocks: set[nn.Module], found: set[nn.Module], unit_numel: int
) -> int:
    """Collect modules that hold much, children first; returns the elements left unclaimed."""
    if module in blocks:
        return 0
    left = sum(p.numel() for p in module.parameters(recurse=isinstance(module, LEAVES)))
    if not isinstance(module, LEAVES):
        left += sum(_find_large(child, blocks, found, unit_numel) for child in module.children())
    if left < unit_numel or isinstance(module, CONTAINERS):
        return left
    found.add(module)
    return 0
