"""Weights that a rank does not hold when its model is sharded: they come one unit at a time.

A model that is larger than a rank is built on the meta device, everywhere or on all ranks but the
first, or lies in memory that the ranks of a host have once, together, or in a rank's files. What
rank 0 holds is streamed from it. What no rank holds is read from safetensors, or made by the
modules' own initialisation. A unit is cut as soon as its values are there, so that a rank holds its
shards and the units that wait for a module inside them: in most models the root's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zerolab.errors import ConfigError
from zerolab.formatting import first_few
from zerotrial.engine.memory.copy_on_write import is_copy_on_write
from zerotrial.engine.module.compilation import strip_compiled
from zerotrial.engine.module.frozen_parameters import shortened_names
from zerotrial.engine.module.memory_swap import swap_memory

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator

__all__ = ["Absent", "WeightFiles"]

logger = logging.getLogger(__name__)


class WeightFiles:
    """Weights in safetensors, read one by one.

    Args:
        path: A file; or a folder, all of whose ``*.safetensors`` are read.

    Raises:
        ConfigError: If there are none, or one cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        where = Path(path)
        files = sorted(where.glob("*.safetensors")) if where.is_dir() else [where]
        self._place_of: dict[str, tuple[Any, str]] = {}
        try:
            for file in files:
                opened = safe_open(file, framework="pt")
                for key in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                    self._place_of[strip_compiled(key)] = (opened, key)
        except (OSError, SafetensorError) as error:
            problem = f"weights: must be safetensors that every rank can read, got {file}: {error}"
            raise ConfigError("initialize()", [problem]) from error
        if not self._place_of:
            raise ConfigError("initialize()", [f"weights: {where} has no tensors in *.safetensors"])

    def check(self, module: nn.Module) -> None:
        """Refuse what does not fit the model.

        Raises:
            ConfigError: Names each tensor that it has not, or has in another shape.
        """
        shapes = {n: t.shape for n, t in module.named_parameters(remove_duplicate=False)}
        shapes |= {n: t.shape for n, t in module.named_buffers(remove_duplicate=False)}
        problems = []
        for name, (file, key) in self._place_of.items():
            found = tuple(file.get_slice(key).get_shape())
            if name not in shapes:
                problems.append(f"weights: the model has no {name}")
            elif tuple(shapes[name]) != found:
                wanted = tuple(shapes[name])
                problems.append(f"weights: {name} must have the shape {wanted}, got {found}")
        if problems:
            raise ConfigError("initialize()", first_few(problems, 8))

    def __contains__(self, name: str) -> bool:
        return name in self._place_of

    def read(self, name: str, out: Tensor) -> None:
        """Fill a tensor; only its own bytes are read."""
        file, key = self._place_of[name]
        out.copy_(file.get_tensor(key))


class Absent:
    """Gives a model its values, module by module, in the order of ``module.apply``. **Collective**.

    Args:
        module: Some of its parameters or buffers are on the meta device on some rank.
        comm: Between the ranks.
        device: Where they are wanted.
        files: Read by rank 0; where they have a value, it counts.

    Raises:
        ConfigError: If nothing can give a parameter its values.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        device: torch.device,
        files: WeightFiles | None,
    ) -> None:
        self._module, self._comm, self._device, self._files = module, comm, device, files
        self._names: dict[Tensor, list[str]] = {}
        for name, value in _named(module):
            self._names.setdefault(value, []).append(name)
        on_first = torch.tensor([float(value.is_meta) for value in self._names], device=device)
        comm.broadcast(on_first)
        flags = zip(self._names, on_first.tolist(), strict=True)
        self._unmade = {value for value, absent in flags if absent and not self._stored(value)}
        self._check_can_be_made()
        if files is not None and comm.rank == 0:
            self._tell_what_files_lack()
        self._parts = _from_the_inside(module, set())
        self._filled: set[Tensor] = set()

    @staticmethod
    def anywhere(module: nn.Module, comm: Communicator, device: torch.device) -> bool:
        """Whether any rank lacks any value, or has it lent. **Collective**."""
        count = sum(value.is_meta or is_copy_on_write(value) for _, value in _named(module))
        return bool(comm.sum(torch.tensor([count], dtype=torch.float64, device=device)).item())

    def in_order(self, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """Yield modules as soon as all within them has its values, on this rank and from rank 0.

        Args:
            modules: The whole model among them.
        """
        wanted = set(modules)
        for part in self._parts:
            self._fill(part)
            if part in wanted:
                yield part

    def _stored(self, value: Tensor) -> str | None:
        names = self._names[value] if self._files is not None else []
        return next((name for name in names if name in (self._files or ())), None)

    def _tell_what_files_lack(self) -> None:
        """Warn of parameters only: many buffers are made by the model, and in no file."""
        parameters = set(self._module.parameters())
        lacking = [
            names[0]
            for value, names in self._names.items()
            if value in parameters and not self._stored(value)
        ]
        if lacking:
            logger.warning(
                "weights: the files do not have %s; they keep the values that the model or its own "
                "initialisation gives them",
                shortened_names(lacking),
            )

    def _check_can_be_made(self) -> None:
        if _init_of_model(self._module) is not None:
            return
        problems = [
            f"{name}.{own} (of {type(part).__name__}): must hold values, got the meta device on "
            "rank 0; give its module a reset_parameters(), or pass weights=, safetensors that "
            "have it"
            for name, part in self._module.named_modules()
            for own, value in _own(part)
            if value in self._unmade and _init_of(part) is None
        ]
        if problems:
            raise ConfigError("stage 3", problems)

    def _fill(self, part: nn.Module) -> None:
        fresh = [value for _, value in _own(part) if value not in self._filled]
        held = {value: value.detach().clone() for value in fresh if self._keeps(part, value)}
        for value in fresh:
            self._materialise(value)
        with torch.no_grad():
            if any(value in self._unmade for value in fresh):
                self._initialise(part)
            for value, kept in held.items():
                value.copy_(kept)
            for value in fresh:
                stored = self._stored(value)
                if stored is not None and self._files is not None and self._comm.rank == 0:
                    self._files.read(stored, value)
                self._comm.broadcast(value.data)
        self._filled.update(fresh)

    def _keeps(self, part: nn.Module, value: Tensor) -> bool:
        """Whether a value is there already, where the module's initialisation would write."""
        return not value.is_meta and any(other in self._unmade for _, other in _own(part))

    def _materialise(self, value: Tensor) -> None:
        """Give a tensor memory; it stays the object that it is."""
        if is_copy_on_write(value) and self._comm.rank > 0:
            value.data = torch.empty_like(value, device=self._device)  # rank 0's come
            return
        if not value.is_meta:
            value.data = value.data.to(self._device)
            return
        memory = torch.empty_like(value, device=self._device)
        if memory.is_floating_point():
            memory.fill_(torch.nan)  # shows what nothing writes to
        swap_memory(value, memory)

    def _initialise(self, part: nn.Module) -> None:
        whole = _init_of_model(self._module)
        make = _init_of(part)
        before = {value: value._version for _, value in _own(part)}  # noqa: SLF001 - of writes
        if whole is not None:
            whole(part)
        elif make is not None:
            make()
        left = [
            name
            for name, value in _own(part)
            if value in self._unmade and _is_unwritten(value, before.get(value))
        ]
        if left:
            kind = type(part).__name__
            problem = f"the initialisation of {kind} must give {', '.join(left)} values, gave none"
            raise ConfigError("stage 3", [f"{problem}; pass weights=, safetensors that have them"])


def _is_unwritten(value: Tensor, version: int | None) -> bool:
    if value.is_floating_point():
        return bool(value.isnan().any())
    return value._version == version  # noqa: SLF001 - as above


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module holds itself."""
    return [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]


def _from_the_inside(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Every module once, after all that it contains: as ``module.apply`` goes."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _from_the_inside(child, seen)
    yield module


def _init_of(part: nn.Module) -> Callable[[], Any] | None:
    """As torch's modules name it."""
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _init_of_model(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """As models of Hugging Face name it: called with each of their modules."""
    return getattr(module, "_init_weights", None)
