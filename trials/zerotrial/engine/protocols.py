"""Protocols of the engine: stage, observer, updater and optimizer factory.

:class:`~zerotrial.engine.engine.Engine` drives a :class:`Stage` without knowing which one. A new
stage, or a new memory for optimizer states, is a new class that implements one of these protocols.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from zerolab.registry import Registry
from zerotrial.engine.module.gradient_access import GradientOwner

if TYPE_CHECKING:
    from os import PathLike

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.comm.communicator import Communicator, Traffic
    from zerotrial.engine.mesh import Mesh
    from zerotrial.engine.module.frozen_parameters import FrozenOriginals
    from zerotrial.engine.module.ownership import ModelOwnership
    from zerotrial.engine.module.precision import Precision

__all__ = [
    "COMMUNICATION",
    "ENGINE_PARTS",
    "GradientSource",
    "NamedParameter",
    "NullObserver",
    "Observer",
    "OptimizerFactory",
    "ParamGroup",
    "Piece",
    "PipelineModel",
    "ReadableGradients",
    "ShardMemory",
    "Stage",
    "StageAccounting",
    "StageInputs",
    "StageStates",
    "StageWeights",
    "StepResult",
    "TensorRanks",
    "TrainingStage",
    "Updater",
    "UpdaterInputs",
    "WindowGradients",
]


ENGINE_PARTS: Registry[Any] = Registry("zerotrial.engine_parts", {})
"""Extensions that the engine calls, see ``EngineConfig.engine_parts``: ``tensor_parallel`` shards
a model, ``pipeline`` is a class of engines, ``profiler`` makes observers, ``cpu_optimizer`` and
``nvme_optimizer`` are updaters, ``nvme_parameters`` is a memory of shards, ``shared_memory``
connects ranks of a host, ``meta_init`` fills models without values, ``watchdog`` names ranks that
are missing from a call, ``full_weights`` reads and writes full tensors by name, ``mpu`` makes the
mesh of an mpu, ``activation_storage`` keeps inputs of recomputed blocks, ``training_loader``
makes the loader of ``training_data``, ``optimizer_probe`` tries a user's optimizer, ``all_reduce``
replaces reduce-scatters, ``older_torch`` adds what torch before 2.13 lacks for stage 3."""

COMMUNICATION = "communication"
"""Name of the phase of all collectives."""

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Piece:
    """A contiguous range of one parameter's flattened elements.

    Owned by this rank (stages 1 to 3), or assigned to it for writing (stage 0). Over all ranks the
    pieces cover every trainable parameter exactly once.
    """

    name: str
    """Name in ``module.named_parameters()``; the first name of tied parameters."""

    shape: torch.Size
    """Shape of the full parameter."""

    start: int
    stop: int
    """Elements ``start:stop`` of the flattened parameter."""

    tensors: Mapping[str, Tensor]
    """``master`` and each optimizer state (``exp_avg``, ...): ``(stop - start,)``, writable."""


@dataclass(frozen=True)
class StepResult:
    """Outcome of one call of ``Engine.step``."""

    updated: bool
    """Whether the weights changed."""

    grad_norm: float | None = None
    """L2 norm of the averaged, unscaled gradient before clipping; None between boundaries."""


@dataclass(frozen=True)
class NamedParameter:
    """Trainable parameter under the first of its names."""

    name: str
    parameter: nn.Parameter


@dataclass
class ParamGroup:
    """Parameters that share optimizer options, in the order of the module."""

    parameters: list[NamedParameter]
    options: dict[str, Any] = field(default_factory=dict)
    """Optimizer options without ``params``: ``lr``, ``weight_decay``, ... as in ``torch.optim``."""


class TensorRanks(Protocol):
    """Ranks along the tensor axis, as tensor parallelism provides them."""

    @property
    def group(self) -> Any:
        """Process group of the axis."""
        ...

    @property
    def rank(self) -> int:
        """This rank's index along the axis."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        ...

    def gather(self, values: Tensor, dim: int) -> Tensor:
        """Concatenate all ranks' values along a dimension. **Collective**."""
        ...


class PipelineModel(Protocol):
    """Model of several pipeline stages; a ``torch.nn.Module`` with ``has_pipeline_stages``."""

    num_stages: int
    requested_stages: int
    """Number of stages, even if built as one stage."""
    activation_checkpoint_interval: int

    def check_config(self, config: "EngineConfig", steps: int) -> None:
        """Raise ConfigError for settings that stages do not support."""
        ...

    def to(self, device: torch.device) -> Any:
        """Move parameters and buffers, as ``torch.nn.Module.to``."""
        ...

    def prepare(self, mesh: "Mesh", interval: int = 0) -> None:
        """Connect the stages over the mesh. **Collective** over all ranks.

        Args:
            mesh: The engine's mesh.
            interval: Number of layers that are recomputed together; 0: as the model says.
        """
        ...

    def set_recompute(self, recompute: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Set the wrapper that recomputes layers in backward."""
        ...


class OptimizerFactory(Protocol):
    """Factory of the engine's optimizer on the tensors that the stage updates."""

    elementwise: bool
    """Whether updates are elementwise, so that parameters may be split."""

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer on ``groups``: one dict of ``params`` and options per ParamGroup."""
        ...


class Observer:
    """Observer of an engine: timers, progress lines, step breakdowns. This one does nothing."""

    times_phases = False
    """Whether :meth:`phase` measures anything."""

    measured: Mapping[str, float] = MappingProxyType({})
    """Values of the last progress line, by the names in ``docs/concepts/engine.md``."""

    def attach(self, engine: Any) -> None:
        """Attach to an engine that has been built."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time the block.

        Args:
            name: ``input``, ``forward``, ``backward``, ``communication`` or ``step``; in pipelines
                also ``send``, ``receive`` and ``tied_gradients``.
        """
        return _NOTHING

    def timed(self, comm: "Communicator") -> "Communicator":
        """Return a communicator whose calls are phases; the same one if nothing is timed."""
        return comm

    def under_way(self, change: int) -> None:
        """Count collectives that start (1) or end (-1)."""

    def add_loss(self, share: Tensor) -> None:
        """Add a loss divided by the micro-batches of a step; it stays on the device."""

    def step_finished(self, result: StepResult) -> None:
        """Handle an accumulation boundary; the engine's counters are up to date."""

    def close(self) -> None:
        """Release resources; the engine is closed."""


class NullObserver(Observer):
    """Observer of ranks that measure nothing."""


class ShardMemory:
    """Memory of stage 3's shards and gradients: that of the devices. Extensions have files."""

    in_files = False
    """Whether shards and gradients are in files."""

    def allocate_like(self, numel: int, like: Tensor) -> Tensor:
        """Return zeros, ``(numel,)``, with the type and device of another tensor."""
        flat = torch.zeros(numel, dtype=like.dtype, device=like.device)
        return flat.pin_memory() if like.is_pinned() else flat

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values in this memory."""
        return tensor

    def release(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from this process, if its values are in a file."""

    def contains(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in a file."""
        del tensor
        return False

    def adopt(self, unit: Any, originals: Sequence[Tensor]) -> None:
        """Move the shards of a unit that has just been sharded, and release its originals."""

    def keep_gradients(
        self, units: Sequence[Any], buckets: Sequence[Any], settle: Callable[[], None]
    ) -> Any:
        """Return the owner of the gradients; None if they are in memory."""


@dataclass(frozen=True)
class StageInputs:
    """Inputs from which a stage is built."""

    module: nn.Module
    """Module on ``device``, in fp32 or as built; the stage casts it. At stage 3 it is on the
    device where the user built it, and may lack values."""

    groups: Sequence[ParamGroup]
    """Trainable parameters by optimizer group; each parameter is in exactly one group."""

    config: "EngineConfig"
    precision: "Precision"
    optimizer_factory: OptimizerFactory
    accumulation_steps: int
    device: torch.device
    mesh: "Mesh"
    """Process groups, and the parameters that count on this rank."""

    ownership: "ModelOwnership"
    """Original state of the module, for its restoration."""

    observer: Observer = field(default_factory=NullObserver)

    weights: "str | PathLike[str] | None" = None
    """Safetensors files to load into the model; only at stage 3."""

    memory: ShardMemory = field(default_factory=ShardMemory)
    """Memory of the shards; only at stage 3."""


class GradientSource(Protocol):
    """Gradients of an unfinished accumulation window, from a checkpoint."""

    has_averages: bool
    """Whether there are averages over ranks; equal on all ranks."""

    has_shares: bool
    """Whether there are shares of this rank, see :meth:`WindowGradients.gradient_pieces`."""

    def read_average(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out``, (numel,), from element ``start`` of a parameter, if it has an average.

        Raises:
            ZerolabError: If it cannot be read.
        """
        ...

    def read_share(self, name: str, out: Tensor) -> bool:
        """Fill ``out``, (numel,), with a parameter's share; return False if it has none.

        Raises:
            ZerolabError: If it cannot be read.
        """
        ...


class TrainingStage(Protocol):
    """Gradients and updates: what a training step calls."""

    optimizer: torch.optim.Optimizer
    """Optimizer whose ``param_groups`` schedules and users change."""

    def leaves(self) -> Iterator[Tensor]:
        """Iterate over the tensors to which autograd writes the gradients."""
        ...

    def on_unexpected_gradient(self, begin: Callable[[], None]) -> None:
        """Register a callback for gradients that arrive without :meth:`before_backward`."""
        ...

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """Prepare for one micro-batch's gradients.

        Args:
            boundary: Whether it is the last micro-batch before a step.
            share: Factor of its gradients.
        """
        ...

    def after_backward(self, *, boundary: bool) -> None:
        """Complete the micro-batch's gradients."""
        ...

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Finish the averaging over ranks. **Collective**, at an accumulation boundary.

        Args:
            loss_scale: Factor of the losses.

        Returns:
            L2 norm, summed in fp64, of the averaged gradient divided by ``loss_scale``; equal on
            all ranks; inf or nan when the gradient is not finite.
        """
        ...

    def apply(self, scale: float) -> None:
        """Multiply the gradient by ``scale``, step, publish the new weights. **Collective**.

        Args:
            scale: Clipping factor divided by the loss scale.
        """
        ...

    def drop_gradients(self) -> None:
        """Clear the accumulated gradients."""
        ...

    def cancel_backward(self) -> None:
        """Clear all gradients after an interrupted backward. **Collective** if some were sent."""
        ...

    def close(self, *, give_back: bool = True) -> None:
        """Remove hooks and release memory shared with other ranks.

        Args:
            give_back: Restore full, plain parameters in the module, in the compute type;
                **Collective** if they are sharded.
        """
        ...


class ReadableGradients(GradientOwner, Protocol):
    """Gradients of single parameters in a stage."""

    @property
    def gathers_gradients(self) -> bool:
        """Whether the next :meth:`read_gradient` is **Collective**."""
        ...


class OptimizerNumbers(Protocol):
    """Creation of an optimizer's states, and its numbers, for checkpoints."""

    def prepare_states(self) -> None:
        """Create the optimizer states as its first step would, so that a load can fill them."""
        ...

    def scalars(self) -> dict[str, float]:
        """Return numbers of the optimizer, e.g. ``group0.step``: one parameter's for its group."""
        ...

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of :meth:`scalars`; call it after :meth:`prepare_states`."""
        ...


class StageStates(Protocol):
    """Master weights and optimizer states, for checkpoints."""

    updater: "Updater"

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Iterate over the pieces that this rank owns, in a fixed order.

        Args:
            write: For a load: iterate over everything that this rank has (at stage 0 all, where a
                save covers only its share), and keep changes of a piece's tensors when the
                iterator advances (needed if states are in files).
        """
        ...

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """Return optimizer states that are not elementwise, by parameter name.

        Each parameter's states come from one rank; empty if there are none.

        Args:
            scalars: Merged :meth:`Updater.scalars` of all ranks; numbers that differ are returned.

        Raises:
            ConfigError: If a state cannot be stored in a checkpoint.
        """
        ...

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore this rank's part of the merged :meth:`other_states` of all ranks.

        Call it after :meth:`Updater.set_scalars`.
        """
        ...

    def weights_changed(self) -> None:
        """Copy loaded master weights to the parameters of every rank. **Collective**."""
        ...


class WindowGradients(Protocol):
    """Gradients of an unfinished accumulation window, for checkpoints."""

    @property
    def local_to_average(self) -> float | None:
        """Factor from the sum of all ranks' shares to their average; None without shares."""
        ...

    def settle_gradients(self) -> None:
        """Finish averaging in progress between boundaries. **Collective**."""
        ...

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Iterate over the accumulated gradients; call :meth:`settle_gradients` before.

        Args:
            write: Iterate over everything that this rank has (at stage 0 all, where a save covers
                only its share); the pieces' tensors are the gradients themselves.

        Yields:
            Pieces of two kinds. ``gradient``: average over ranks; each element comes from one
            rank. ``share``: a full parameter's gradient on this rank, not averaged yet.
        """
        ...

    def resume_gradients(self, source: GradientSource) -> None:
        """Continue with the gradients of a checkpoint, when there are no others.

        Raises:
            ZerolabError: If the source cannot be read; then there are no gradients.
        """
        ...


class StageWeights(Protocol):
    """Full weights, gathered from the ranks."""

    originals: "FrozenOriginals"
    """Frozen parameters in their original precision."""

    gathers: bool
    """Whether forward is **Collective**, because it gathers weights."""

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """Gather parameters in their modules while the context lasts. **Collective** if sharded."""
        ...

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter in full, one at a time. **Collective**."""
        ...

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """Return functions that write a full tensor to this rank's shard, by module and name."""
        ...


class StageAccounting(Protocol):
    """Memory and traffic of a stage."""

    @property
    def traffic(self) -> "Traffic":
        """Number of elements transferred by collectives."""
        ...

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors by kind: parameters, gradients, optimizer, master, buckets."""
        ...


class Stage(
    TrainingStage,
    ReadableGradients,
    StageStates,
    WindowGradients,
    StageWeights,
    StageAccounting,
    Protocol,
):
    """Placement of parameters, gradients and optimizer states, and their collectives.

    Users of a stage annotate the protocol that they need.
    """


@dataclass(frozen=True)
class UpdaterInputs:
    """Inputs from which an :class:`Updater` is built: this rank's part of the flat buckets."""

    masters: Sequence[Tensor]
    """Initial fp32 weights of each bucket, ``(shard numel,)``; for optimizers that need full
    parameters, see ``shapes``. May alias the model's parameters (fp32 training)."""

    group_indices: Sequence[int]
    """Index in ``groups`` of each bucket."""

    groups: Sequence[dict[str, Any]]
    """Optimizer options of each ParamGroup, without ``params``."""

    optimizer_factory: OptimizerFactory
    config: "EngineConfig"
    device: torch.device
    shapes: Sequence[Sequence[tuple[int, int, torch.Size]]] | None = None
    """Full parameters in each bucket's shard, as ``(start, stop, shape)``; None if the optimizer is
    elementwise and each shard is one flat tensor."""


class Updater(OptimizerNumbers, Protocol):
    """Owner of this rank's master weights and optimizer states, stepped bucket by bucket.

    In memory by default; offloading is another class with this interface.
    """

    optimizer: torch.optim.Optimizer

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard.

        Args:
            index: Index of the bucket; each bucket once per step, in ascending order.
            gradient: Averaged, ``(shard numel,)``, any float type; may be overwritten.
            scale: Factor still to be applied to the gradient.
            publish: ``(shard numel,)`` in the compute type; receives the new weights. May alias the
                master.

        Returns:
            Whether ``publish`` is already written; otherwise it is after :meth:`finish`.
        """
        ...

    def freeze(self, index: int, spans: Sequence[slice]) -> None:
        """Exclude elements from all further steps: weights, states and step counts.

        Args:
            index: Index of the bucket.
            spans: Ranges of its shard, one parameter each; they replace those of earlier calls.
        """
        ...

    def member_scalars(self, index: int) -> Sequence[tuple[slice, Mapping[str, float]]]:
        """Return the numbers of the optimizer by part of a bucket's shard.

        Args:
            index: Index of the bucket.

        Returns:
            Range, and numbers with the names of :meth:`scalars`, all under group 0.
        """
        ...

    def set_member_scalars(self, index: int, span: slice, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of :meth:`member_scalars` for the elements of a span."""
        ...

    def finish(self) -> None:
        """End the step: all published weights are written when this returns."""
        ...

    def states(self, index: int, *, write: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield one bucket's ``master`` and optimizer states, each ``(shard numel,)``.

        Args:
            index: Index of the bucket.
            write: Keep changes when the context ends.
        """
        ...

    def other_states(self, scalars: Mapping[str, float]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Return states that are not elementwise, for each bucket and full parameter.

        See :meth:`StageStates.other_states`.
        """
        ...

    def set_other_states(self, index: int, position: int, values: Mapping[str, Any]) -> None:
        """Restore one parameter's states; call it after :meth:`set_scalars`.

        Args:
            index: Index of the bucket.
            position: Position of the parameter in :meth:`other_states`.
            values: States by name.
        """
        ...

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors of kinds ``master`` and ``optimizer`` in this process's memory."""
        ...

    def close(self) -> None:
        """Release files and threads."""
        ...
