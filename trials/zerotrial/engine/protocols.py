"""The seams of the engine: what a stage, an observer and an optimizer factory must offer.

:class:`~zerotrial.engine.engine.Engine` drives a :class:`Stage` and never asks which one it is; a
new stage, or another place for optimizer states, is a new class behind one of these interfaces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from os import PathLike

    from zerolab.config.engine.engine_config import EngineConfig
    from zerotrial.engine.comm.communicator import Traffic
    from zerotrial.engine.mesh import Mesh
    from zerotrial.engine.module.frozen import FrozenOriginals
    from zerotrial.engine.module.precision import Precision
    from zerotrial.engine.module.taken import Taken

__all__ = [
    "GradientSource",
    "NamedParameter",
    "NullObserver",
    "Observer",
    "OptimizerFactory",
    "ParamGroup",
    "Piece",
    "Stage",
    "StageInputs",
    "StepResult",
    "Updater",
    "UpdaterInputs",
]


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Piece:
    """A contiguous range of one parameter's flattened elements.

    This rank owns it (stages 1 to 3) or is charged with writing it (stage 0). Over all ranks the
    pieces cover every trainable parameter exactly once.
    """

    name: str
    """In ``module.named_parameters()``; of tied parameters the first name."""

    shape: torch.Size
    """Of the whole parameter."""

    start: int
    stop: int
    """Elements ``start:stop`` of the flattened parameter."""

    tensors: Mapping[str, Tensor]
    """``master`` and each optimizer state (``exp_avg``, ...): ``(stop - start,)``, writable."""


@dataclass(frozen=True)
class StepResult:
    """What one call of ``Engine.step`` did."""

    updated: bool
    """Whether the weights changed."""

    grad_norm: float | None = None
    """L2 norm of the averaged, unscaled gradient before clipping; None between boundaries."""


@dataclass(frozen=True)
class NamedParameter:
    """A trainable parameter, once, under the first of its names."""

    name: str
    parameter: nn.Parameter


@dataclass
class ParamGroup:
    """Parameters that share optimizer options, in the order of the module."""

    parameters: list[NamedParameter]
    options: dict[str, Any] = field(default_factory=dict)
    """Besides ``params``: ``lr``, ``weight_decay``, ... as ``torch.optim`` names them."""


class OptimizerFactory(Protocol):
    """Makes the one optimizer of an engine, on whatever tensors the stage wants updated."""

    elementwise: bool
    """Whether an element's update depends on no other element, so that parameters may be cut."""

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build it on ``groups`` (``params`` and options, as many as there are ParamGroups)."""
        ...


class Observer(Protocol):
    """Is told what the engine does: timers, progress lines, breakdowns."""

    @property
    def times_phases(self) -> bool:
        """Whether :meth:`phase` measures anything."""
        ...

    @property
    def measured(self) -> Mapping[str, float]:
        """Numbers of the last line, by the names in ``docs/engine.md``."""
        ...

    def attach(self, engine: Any) -> None:
        """Get to know the engine, when it is built."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside.

        Args:
            name: ``input``, ``forward``, ``backward``, ``communication`` or ``step``; in pipelines
                also ``send``, ``receive`` and ``tied_gradients``.
        """
        ...

    def under_way(self, change: int) -> None:
        """Count collectives that have begun (1) or ended (-1)."""
        ...

    def add_loss(self, share: Tensor) -> None:
        """Take note of a loss, divided by the micro-batches of a step; on the device."""
        ...

    def step_finished(self, result: StepResult) -> None:
        """Take note of an accumulation boundary (counters are already up to date)."""
        ...

    def close(self) -> None:
        """End: the engine is closed."""
        ...


class NullObserver:
    """Observes nothing, at no cost."""

    times_phases = False
    measured: Mapping[str, float] = MappingProxyType({})

    def attach(self, engine: Any) -> None:
        """Do nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return _NOTHING

    def under_way(self, change: int) -> None:
        """Do nothing."""

    def add_loss(self, share: Tensor) -> None:
        """Do nothing."""

    def step_finished(self, result: StepResult) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class StageInputs:
    """Everything that a stage may be built from."""

    module: nn.Module
    """On ``device``, still in fp32 (or as the user made it); the stage casts it. At stage 3 it is
    where the user has built it, and may lack values."""

    groups: Sequence[ParamGroup]
    """Trainable parameters by optimizer group; each parameter in exactly one."""

    config: "EngineConfig"
    precision: "Precision"
    optimizer_factory: OptimizerFactory
    accumulation_steps: int
    device: torch.device
    mesh: "Mesh"
    """Between which ranks there is what, and which parameters count on this one."""

    taken: "Taken"
    """How the module was, so that it can be given back."""

    observer: Observer = field(default_factory=NullObserver)

    weights: "str | PathLike[str] | None" = None
    """Safetensors that the model is to be filled from; only at stage 3."""


class GradientSource(Protocol):
    """Gradients that a checkpoint has of an accumulation window it was made in."""

    has_averages: bool
    """Whether there are averages over ranks; the same on all ranks."""

    has_shares: bool
    """Whether there are shares of this rank, as :meth:`Stage.gradient_pieces` gave them."""

    def read_average(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out``, (numel,), from element ``start`` of a parameter; leave it if it has none.

        Raises:
            ZerolabError: If it cannot be read.
        """
        ...

    def read_share(self, name: str, out: Tensor) -> bool:
        """Fill ``out``, (numel,), with all of a parameter; False if it has no share.

        Raises:
            ZerolabError: If it cannot be read.
        """
        ...


class Stage(Protocol):
    """Where parameters, gradients and optimizer states live, and which collective moves them."""

    optimizer: torch.optim.Optimizer
    """The one whose ``param_groups`` schedules and users touch."""

    originals: "FrozenOriginals"
    """Frozen parameters in the precision in which they were given."""

    gathers: bool
    """Whether a forward pass is **Collective**: it gathers weights."""

    @property
    def traffic(self) -> "Traffic":
        """What went through collectives, in elements."""
        ...

    @property
    def share_factor(self) -> float | None:
        """Turns the sum over ranks of unaveraged gradients into their average; None: none wait."""
        ...

    def leaves(self) -> Iterator[Tensor]:
        """Walk the tensors that autograd writes the gradients of trained parameters to."""
        ...

    def when_unannounced(self, begin: Callable[[], None]) -> None:
        """Have ``begin`` called where gradients come with no :meth:`before_backward`."""
        ...

    def before_backward(self, *, boundary: bool, share: float = 1.0) -> None:
        """Get ready for one micro-batch's gradients.

        Args:
            boundary: It is the last before a step.
            share: What they are multiplied by.
        """
        ...

    def after_backward(self, *, boundary: bool) -> None:
        """Take note that the micro-batch's gradients are complete."""
        ...

    def reduce_gradients(self, loss_scale: float = 1.0) -> float:
        """Finish the averaging over ranks. **Collective**, at an accumulation boundary.

        Args:
            loss_scale: The factor that the losses were multiplied by.

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
        """Forget the gradients gathered so far."""
        ...

    def cancel_backward(self) -> None:
        """Forget all gradients, a torn backward's too. **Collective** if some were sent."""
        ...

    @property
    def gathers_gradients(self) -> bool:
        """Whether the next :meth:`read_gradient` is **Collective**."""
        ...

    @property
    def gradients_readable(self) -> bool:
        """Whether :meth:`read_gradient` does not raise."""
        ...

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Return whether the stage keeps the gradient of a parameter."""
        ...

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the averaged gradient of a parameter, between a backward and a step.

        **Collective** where :attr:`gathers_gradients` says so.

        Returns:
            In the parameter's shape, times the loss scale; writes to it in place count. None where
            it has none.

        Raises:
            EngineError: At stage 3.
        """
        ...

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Replace what :meth:`read_gradient` returns; None leaves the parameter out of the step."""
        ...

    def settle_gradients(self) -> None:
        """Finish the averaging that is under way between boundaries. **Collective**."""
        ...

    def gradient_pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk the gradients gathered so far; after :meth:`settle_gradients`.

        Args:
            write: Walk everything that this rank holds (at stage 0 that is all, where a save walks
                its share); the pieces' tensors are the gradients themselves.

        Yields:
            Pieces of two kinds. ``gradient``: averaged over ranks; each element comes from one
            rank. ``share``: a whole parameter's, this rank's own and not averaged yet.
        """
        ...

    def resume_gradients(self, source: GradientSource) -> None:
        """Go on with the gradients of a checkpoint; when none are held.

        Raises:
            ZerolabError: If the source cannot be read; nothing is held then that counts.
        """
        ...

    def pieces(self, *, write: bool = False) -> Iterator[Piece]:
        """Walk what this rank owns, in a fixed order.

        Args:
            write: For a load: walk everything that this rank holds (at stage 0 that is all, where
                a save walks its share), and keep what is changed in a piece's tensors when the
                iterator advances (needed where states live in files).
        """
        ...

    def scalars(self) -> dict[str, float]:
        """Numbers that the optimizer keeps, e.g. ``group0.step``: one parameter's for its group."""
        ...

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore what :meth:`scalars` gave; call after :meth:`prepare_states`."""
        ...

    def other_states(self, scalars: Mapping[str, float]) -> dict[str, Mapping[str, Any]]:
        """Return optimizer states that do not go by element, by the name of the parameter.

        Each parameter's from one rank; where none has any, nothing.

        Args:
            scalars: What all ranks' :meth:`scalars` gave together; other numbers are returned.

        Raises:
            ConfigError: If it keeps what no checkpoint can hold.
        """
        ...

    def set_other_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore this rank's part of what all ranks' :meth:`other_states` gave together.

        Call after :meth:`set_scalars`.
        """
        ...

    def prepare_states(self) -> None:
        """Make the optimizer's states as its first step would, so that a load can fill them."""
        ...

    def weights_changed(self) -> None:
        """Publish master weights to the parameters of every rank, after a load. **Collective**."""
        ...

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors by kind: parameters, gradients, optimizer, master, buckets."""
        ...

    def gathered(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """Have parameters whole in their modules in a context. **Collective** where sharded."""
        ...

    def full_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every trainable parameter, whole, one after the other. **Collective**."""
        ...

    def full_writers(self) -> Mapping[nn.Module, Mapping[str, Callable[[Tensor], None]]]:
        """Return what writes a full tensor to this rank's shard, by module and parameter name."""
        ...

    def close(self, *, give_back: bool = True) -> None:
        """Remove hooks and give memory shared with other ranks back.

        Args:
            give_back: Leave the module with whole, plain parameters of its own, in the types in
                which it computes; **Collective** where they are sharded.
        """
        ...


@dataclass(frozen=True)
class UpdaterInputs:
    """What an :class:`Updater` is built from: this rank's part of the flat buckets."""

    masters: Sequence[Tensor]
    """One for each bucket: initial fp32 weights, ``(shard numel,)`` or, for optimizers that need
    whole parameters, see ``shapes``. May alias the model's parameters (fp32 training)."""

    group_indices: Sequence[int]
    """For each bucket, its index in ``groups``."""

    groups: Sequence[dict[str, Any]]
    """Optimizer options of each ParamGroup, without ``params``."""

    optimizer_factory: OptimizerFactory
    config: "EngineConfig"
    device: torch.device
    shapes: Sequence[Sequence[tuple[int, int, torch.Size]]] | None = None
    """For each bucket the whole parameters in its shard, as ``(start, stop, shape)``; None when the
    optimizer is elementwise and each shard is one flat tensor."""


class Updater(Protocol):
    """Owns this rank's master weights and optimizer states, and steps them bucket by bucket.

    In memory by default; offload is another class behind this interface.
    """

    optimizer: torch.optim.Optimizer

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard.

        Args:
            index: Of the bucket; every bucket once in a step, in ascending order.
            gradient: Averaged, ``(shard numel,)``, any float type; may be overwritten.
            scale: What the gradient is still to be multiplied by.
            publish: ``(shard numel,)`` in the compute type; receives the new weights. May alias the
                master.

        Returns:
            Whether ``publish`` is in place already; if not, it is after :meth:`finish`.
        """
        ...

    def hold(self, index: int, spans: Sequence[slice]) -> None:
        """Leave elements alone in all steps from now on: weights, states and step counts.

        Args:
            index: Of the bucket.
            spans: Of its shard, each of one parameter; those of an earlier call are stepped again.
        """
        ...

    def member_scalars(self, index: int) -> Sequence[tuple[slice, Mapping[str, float]]]:
        """Return the numbers that the optimizer keeps, by part of a bucket's shard.

        Args:
            index: Of the bucket.

        Returns:
            Elements, and the numbers as :meth:`scalars` names them, all under group 0.
        """
        ...

    def set_member_scalars(self, index: int, span: slice, scalars: Mapping[str, float]) -> None:
        """Restore what :meth:`member_scalars` gave for the elements of a span."""
        ...

    def finish(self) -> None:
        """End the step: everything published is in place when this returns."""
        ...

    def states(self, index: int, *, write: bool) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Lend one bucket's ``master`` and optimizer states, each ``(shard numel,)``.

        Args:
            index: Of the bucket.
            write: Keep what was changed when the context ends.
        """
        ...

    def other_states(self, scalars: Mapping[str, float]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """Return what does not go by element, for each bucket and whole parameter.

        See :meth:`Stage.other_states`.
        """
        ...

    def set_other_states(self, index: int, place: int, values: Mapping[str, Any]) -> None:
        """Restore them for one parameter; call after :meth:`set_scalars`.

        Args:
            index: Of the bucket.
            place: Of the parameter in what :meth:`other_states` gave.
            values: By name.
        """
        ...

    def prepare_states(self) -> None:
        """See :meth:`Stage.prepare_states`."""
        ...

    def scalars(self) -> dict[str, float]:
        """See :meth:`Stage.scalars`."""
        ...

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """See :meth:`Stage.scalars`."""
        ...

    def held(self) -> dict[str, list[Tensor]]:
        """Tensors of kind ``master`` and ``optimizer`` that are in this process's memory."""
        ...

    def close(self) -> None:
        """Give files and threads back."""
        ...
