"""Checkpoint content other than parameters and optimizer states.

Objects are written by ``torch.save`` and must load with ``torch.load(weights_only=True)``. That is
tried while saving, so that a checkpoint that cannot be loaded is never written.
"""

import io
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.module.frozen_parameters import FrozenOriginals
from zerotrial.engine.module.full_tensor import full_tensor_of, is_sharded

__all__ = [
    "CLIENT_STATE",
    "ENGINE_STATE",
    "Stateful",
    "buffers_of",
    "from_file",
    "get_random_state",
    "module_extra_state",
    "module_targets",
    "module_tensors",
    "names_by_first",
    "other_states_file",
    "rank_file",
    "set_module_extra_state",
    "set_module_tensor",
    "set_random_state",
    "to_bytes",
    "unsavable",
]

ENGINE_STATE = "state.pt"
CLIENT_STATE = "client_state.pt"


def rank_file(rank: int) -> str:
    """Return the file name of a rank's state."""
    return f"rank-{rank:05}.pt"


def other_states_file(rank: int) -> str:
    """Return the file name of a rank's non-elementwise optimizer states."""
    return f"states-{rank:05}.pt"


class Stateful(Protocol):
    """Object with a state: a schedule, a loss scaler, counters."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""
        ...


def to_bytes(label: str, value: Mapping[str, Any]) -> bytes:
    """Serialize a mapping.

    Args:
        label: Name for errors.
        value: Tensors, numbers, strings, and containers of them.

    Raises:
        CheckpointError: With the keys that could not be loaded again.
    """
    content = _serialize(value)
    if content is None:
        msg = (
            f"{label}: must hold tensors, numbers, strings and containers of them, which "
            f"torch.load(weights_only=True) can read; these do not: {', '.join(unsavable(value))}"
        )
        raise CheckpointError(msg)
    return content


def _serialize(value: Any) -> bytes | None:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - any failure means that it cannot be loaded
        return None
    return buffer.getvalue()


def unsavable(values: Mapping[str, Any]) -> list[str]:
    """Return paths and types of values that no checkpoint can store.

    Values in containers are named by their path: ``'loops'['fit'][0] (Path)``.
    """
    return [text for name, value in values.items() for text in _unsavable(repr(name), value, ())]


def _unsavable(path: str, value: Any, ancestors: tuple[Any, ...]) -> list[str]:
    if _serialize({"value": value}) is not None or any(value is ancestor for ancestor in ancestors):
        return []
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        inside = list(value.items())
    elif isinstance(value, (list, tuple)):
        inside = list(enumerate(value))
    ancestors = (*ancestors, value)
    texts = [text for key, v in inside for text in _unsavable(f"{path}[{key!r}]", v, ancestors)]
    return texts or [f"{path} ({type(value).__name__})"]  # the container itself, or a key of it


def from_file(path: Path) -> Any:
    """Read a file written from :func:`to_bytes`.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = "".join(str(error).splitlines()[:1])
        msg = f"{path}: missing or damaged ({type(error).__name__}: {reason})"
        raise CheckpointError(msg) from error


def get_random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process."""
    numpy_state: tuple[Any, ...] = tuple(np.random.get_state(legacy=True))
    numpy_name, keys, position, has_gauss, gauss = numpy_state
    version, mersenne_state, python_gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(mersenne_state), python_gauss),
        "numpy": (
            str(numpy_name),
            torch.from_numpy(keys.astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`get_random_state`."""
    version, mersenne_state, python_gauss = state["python"]
    random.setstate((version, tuple(mersenne_state.tolist()), python_gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def module_targets(
    module: nn.Module, trainable: set[str], *, frozen: bool = True
) -> dict[str, Tensor]:
    """Return the buffers and the parameters that no optimizer updates.

    Args:
        module: The model.
        trainable: Parameters that are saved elsewhere.
        frozen: Whether to include parameters.

    Returns:
        Tensors by name; only persistent buffers.
    """
    targets: dict[str, Tensor] = {}
    if frozen:
        targets |= {n: p for n, p in module.named_parameters() if n not in trainable}
    for prefix, part in module.named_modules():
        non_persistent = part._non_persistent_buffers_set  # noqa: SLF001 - torch has no public name for it
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in non_persistent:
                targets[name] = buffer
    return targets


def module_tensors(
    module: nn.Module,
    trainable: set[str],
    *,
    frozen: bool = True,
    originals: FrozenOriginals | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Copy the tensors of :func:`module_targets` to host memory. **Collective**.

    Args:
        module: See :func:`module_targets`.
        trainable: See :func:`module_targets`.
        frozen: See :func:`module_targets`.
        originals: Values of frozen parameters before they were rounded.
    """
    for name, tensor in module_targets(module, trainable, frozen=frozen).items():
        value = full_tensor_of(tensor.detach())
        if originals is not None:
            value = originals.full(name, value)
        yield name, value.to("cpu", copy=True).contiguous()


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's buffers to host memory."""
    names = {name for name, _ in module.named_parameters()}
    return dict(module_tensors(module, names, frozen=False))


def set_module_tensor(target: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor of the model, sharded or not."""
    with torch.no_grad():
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor

            converted = value.to(device=target.device, dtype=target.dtype)
            # Every rank has the full value, so no communication is needed.
            part = distribute_tensor(
                converted, target.device_mesh, target.placements, src_data_rank=None
            )
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(value)


def module_extra_state(module: nn.Module) -> dict[str, Any]:
    """Return the results of ``Module.get_extra_state`` by module name."""
    states = {}
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            states[name] = part.get_extra_state()
    return states


def set_module_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`module_extra_state`."""
    parts = dict(module.named_modules())
    for name, value in state.items():
        if name in parts:  # otherwise it is another rank's
            parts[name].set_extra_state(value)


def names_by_first(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first name."""
    by_parameter: dict[Any, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(parameter, []).append(name)
    return {names[0]: names for names in by_parameter.values()}
