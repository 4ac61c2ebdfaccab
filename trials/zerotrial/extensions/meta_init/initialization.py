"""Initialization of models on the meta device, one unit at a time, while they are sharded.

A model larger than one rank's memory is built on the meta device, on all ranks or on all but the
first, or lies in memory shared by the ranks of a host, or in a rank's files. Rank 0 broadcasts the
values it has. Values that no rank has are read from safetensors or computed by the modules' own
initialization. A unit is sharded as soon as its values exist. A rank therefore holds its shards
and the units that wait for a module inside them: in most models only the root.
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
from zerotrial.engine.module.full_tensor import swap_memory

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator

__all__ = ["MetaInit", "WeightFiles"]

logger = logging.getLogger(__name__)


class WeightFiles:
    """Weights in safetensors, read one by one.

    Args:
        path: A file, or a folder whose ``*.safetensors`` are all read.

    Raises:
        ConfigError: If there is no file or one cannot be read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        location = Path(path)
        files = sorted(location.glob("*.safetensors")) if location.is_dir() else [location]
        self._location_of: dict[str, tuple[Any, str]] = {}
        try:
            for file in files:
                opened = safe_open(file, framework="pt")
                for key in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                    self._location_of[strip_compiled(key)] = (opened, key)
        except (OSError, SafetensorError) as error:
            problem = f"weights: must be safetensors that every rank can read, got {file}: {error}"
            raise ConfigError("initialize()", [problem]) from error
        if not self._location_of:
            raise ConfigError(
                "initialize()", [f"weights: {location} has no tensors in *.safetensors"]
            )

    def check(self, module: nn.Module) -> None:
        """Check names and shapes against the model.

        Raises:
            ConfigError: Lists the tensors that are unknown or have another shape.
        """
        shapes = {n: t.shape for n, t in module.named_parameters(remove_duplicate=False)}
        shapes |= {n: t.shape for n, t in module.named_buffers(remove_duplicate=False)}
        problems = []
        for name, (file, key) in self._location_of.items():
            shape = tuple(file.get_slice(key).get_shape())
            if name not in shapes:
                problems.append(f"weights: the model has no {name}")
            elif tuple(shapes[name]) != shape:
                expected = tuple(shapes[name])
                problems.append(f"weights: {name} must have the shape {expected}, got {shape}")
        if problems:
            raise ConfigError("initialize()", first_few(problems, 8))

    def __contains__(self, name: str) -> bool:
        return name in self._location_of

    def read(self, name: str, out: Tensor) -> None:
        """Fill a tensor. Only its own bytes are read."""
        file, key = self._location_of[name]
        out.copy_(file.get_tensor(key))


class MetaInit:
    """Fills a model's tensors, module by module, in the order of ``module.apply``. **Collective**.

    Args:
        module: Some of its parameters or buffers are on the meta device on some rank.
        comm: Communicator of the data-parallel ranks.
        device: Target device.
        weights: Safetensors, read by rank 0. Their values take precedence.

    Raises:
        ConfigError: If a parameter can be neither read nor initialized, or ``weights`` do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator,
        device: torch.device,
        weights: str | PathLike[str] | None,
    ) -> None:
        files = None if weights is None else WeightFiles(weights)
        if files is not None:
            files.check(module)
        self._module, self._comm, self._device, self._files = module, comm, device, files
        self._names: dict[Tensor, list[str]] = {}
        for name, value in _named(module):
            self._names.setdefault(value, []).append(name)
        on_first = torch.tensor([float(value.is_meta) for value in self._names], device=device)
        comm.broadcast(on_first)
        flags = zip(self._names, on_first.tolist(), strict=True)
        self._uninitialized = {
            value for value, is_meta in flags if is_meta and not self._stored_name(value)
        }
        self._check_initializable()
        if files is not None and comm.rank == 0:
            self._warn_of_missing_tensors()
        self._parts = _post_order(module, set())
        self._filled: set[Tensor] = set()

    def in_order(self, modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """Yield each module as soon as everything inside it has rank 0's values.

        Args:
            modules: They include the model itself.
        """
        remaining = set(modules)
        for part in self._parts:
            self._fill(part)
            if part in remaining:
                yield part

    def _stored_name(self, value: Tensor) -> str | None:
        names = self._names[value] if self._files is not None else []
        return next((name for name in names if name in (self._files or ())), None)

    def _warn_of_missing_tensors(self) -> None:
        """Warn about parameters only: many buffers are computed and stored in no file."""
        parameters = set(self._module.parameters())
        lacking = [
            names[0]
            for value, names in self._names.items()
            if value in parameters and not self._stored_name(value)
        ]
        if lacking:
            logger.warning(
                "weights: the files do not have %s; they keep the values that the model or its own "
                "initialization gives them",
                shortened_names(lacking),
            )

    def _check_initializable(self) -> None:
        if _init_weights_method(self._module) is not None:
            return
        problems = [
            f"{name}.{own_name} (of {type(part).__name__}): must hold values, got the meta device "
            "on rank 0; give its module a reset_parameters(), or pass weights=, safetensors that "
            "have it"
            for name, part in self._module.named_modules()
            for own_name, value in _own_tensors(part)
            if value in self._uninitialized and _reset_method(part) is None
        ]
        if problems:
            raise ConfigError("stage 3", problems)

    def _fill(self, part: nn.Module) -> None:
        fresh = [value for _, value in _own_tensors(part) if value not in self._filled]
        preset = {
            value: value.detach().clone()
            for value in fresh
            if self._would_be_overwritten(part, value)
        }
        for value in fresh:
            self._materialize(value)
        with torch.no_grad():
            if any(value in self._uninitialized for value in fresh):
                self._initialize(part)
            for value, initial in preset.items():
                value.copy_(initial)
            for value in fresh:
                stored = self._stored_name(value)
                if stored is not None and self._files is not None and self._comm.rank == 0:
                    self._files.read(stored, value)
                self._comm.broadcast(value.data)
        self._filled.update(fresh)

    def _would_be_overwritten(self, part: nn.Module, value: Tensor) -> bool:
        """Whether the module's initialization would overwrite an existing value."""
        return not value.is_meta and any(
            other in self._uninitialized for _, other in _own_tensors(part)
        )

    def _materialize(self, value: Tensor) -> None:
        """Allocate a tensor's memory without replacing the object."""
        if is_copy_on_write(value) and self._comm.rank > 0:
            value.data = torch.empty_like(value, device=self._device)  # broadcast below
            return
        if not value.is_meta:
            value.data = value.data.to(self._device)
            return
        memory = torch.empty_like(value, device=self._device)
        if memory.is_floating_point():
            memory.fill_(torch.nan)  # marks elements that initialization does not write
        swap_memory(value, memory)

    def _initialize(self, part: nn.Module) -> None:
        init_weights = _init_weights_method(self._module)
        reset = _reset_method(part)
        before = {value: value._version for _, value in _own_tensors(part)}  # noqa: SLF001 - counts writes
        if init_weights is not None:
            init_weights(part)
        elif reset is not None:
            reset()
        unwritten = [
            name
            for name, value in _own_tensors(part)
            if value in self._uninitialized and _is_unwritten(value, before.get(value))
        ]
        if unwritten:
            kind = type(part).__name__
            problem = (
                f"the initialization of {kind} must give {', '.join(unwritten)} values, gave none"
            )
            raise ConfigError("stage 3", [f"{problem}; pass weights=, safetensors that have them"])


def _is_unwritten(value: Tensor, version: int | None) -> bool:
    if value.is_floating_point():
        return bool(value.isnan().any())
    return value._version == version  # noqa: SLF001 - as above


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _own_tensors(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the module's own tensors."""
    return [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once, after its children, as ``module.apply`` does."""
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _post_order(child, seen)
    yield module


def _reset_method(part: nn.Module) -> Callable[[], Any] | None:
    """Return the initialization method of torch modules."""
    return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)


def _init_weights_method(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Return the method of Hugging Face models that initializes one submodule."""
    return getattr(module, "_init_weights", None)
