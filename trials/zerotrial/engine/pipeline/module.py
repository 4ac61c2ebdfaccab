"""A model as a list of layers, of which each rank builds and runs its own.

::

    layers       0  1  2 | 3  4 | 5  6 | 7          4 chunks
    ranks        0       | 1    | 0    | 1          2 pipeline stages, 2 chunks on each rank

Parameters are named by the place of their layer in the whole model (``layers.5.weight``), wherever
it is cut, so that checkpoints of one cut are those of any other. A tied layer is named by its first
place. What a layer starts with depends on its place alone, and not on the number of stages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zerolab.errors import ConfigError, EngineError
from zerotrial.engine.mesh import Mesh, Tie
from zerotrial.engine.module.activation import Recompute, recomputed
from zerotrial.engine.pipeline.layers import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    check_layers,
    name_of,
    shared_problems,
)
from zerotrial.engine.pipeline.partitioning import partition

__all__ = ["Chunk", "PipelineModule", "built_whole"]

_AXES = ("pipe", "data", "model")
"""Of a topology, in the order in which ranks are laid out."""

_built_whole: ContextVar[bool] = ContextVar("built_whole", default=False)


@contextmanager
def built_whole() -> Iterator[None]:
    """Have every :class:`PipelineModule` built with all its layers, as one stage, in this context.

    For who looks at a model without ranks to train it.
    """
    token = _built_whole.set(True)
    try:
        yield
    finally:
        _built_whole.reset(token)


class Chunk(nn.Module):
    """Layers that follow each other on one rank.

    Args:
        calls: Of the layers, in order.
        layers: Those that are modules, by their places in the model.
        interval: Layers that are computed again in backward together; 0 remembers all.
        recompute: Says where their inputs wait. That of the first layers waits as it is: it is
            kept anyhow, to send its gradient back.
    """

    def __init__(
        self,
        calls: Sequence[Callable[[Any], Any]],
        layers: nn.ModuleDict,
        interval: int,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.layers = layers
        self._calls = list(calls)
        parts = [
            partial(_run, self._calls[start : start + interval])
            for start in (range(0, len(self._calls), interval) if interval else ())
        ]
        self._again = [recompute(part) if at else recomputed(part) for at, part in enumerate(parts)]

    def forward(self, *inputs: Any) -> Any:
        """Run them; several inputs are one tuple for the first layer of the model."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        return _run(self._again or self._calls, value)


def _run(calls: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


class PipelineModule(nn.Module):
    """A model cut into pipeline stages; :func:`zerotrial.initialize` gives an engine for it.

    Args:
        layers: Specifications, modules or functions, in any iterable, such as ``nn.ModuleList``.
            The output of each is the one input of the next: a tensor, or a tuple of tensors.
        num_stages: Pipeline stages; the ranks must be a multiple.
        topology: Says it instead: anything with ``get_dim("pipe")``.
        loss_fn: Called with the last output and the labels, returns the mean over the micro-batch;
            None: the last layer's output is the loss.
        seed_layers: Seed each layer with ``base_seed`` and its place. Else the seed is drawn from
            torch's generator, once for all layers.
        seed_fn: Called with a layer's seed before it is built; ``torch.manual_seed`` by default.
        base_seed: See ``seed_layers``.
        partition_method: See :func:`zerotrial.engine.pipeline.partition`.
        activation_checkpoint_interval: Layers that are computed again in backward together; 0
            remembers all activations.
        chunks: Parts of the model on each rank, for the interleaved and zero-bubble schedules.
        sample: For ``partition_method="time"``: an input of the first layer.

    Raises:
        ConfigError: With all problems of the arguments.
    """

    def __init__(  # noqa: PLR0917 - DeepSpeed's order
        self,
        layers: Iterable[Layer],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        *,
        chunks: int = 1,
        sample: Any = None,
    ) -> None:
        super().__init__()
        self._specs = check_layers(layers)
        self.topology = topology
        asked = _count_stages(num_stages, topology)
        self.asked_stages = asked
        """Pipeline stages, however this one was built."""
        self.num_stages = 1 if _built_whole.get() else asked
        self.loss_fn = loss_fn
        self.asked_chunks = chunks
        """Chunks on each rank, where there are several stages."""
        self.chunks = chunks if self.num_stages > 1 else 1
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._recompute: Recompute = recomputed
        ranks, rank = _place()
        self._check(ranks)
        self.stage_id = rank // (ranks // self.num_stages)
        """The pipeline stage of this rank."""
        self.parts = self._cut(partition_method, sample)
        """Boundaries of the chunks of all ranks, in the order in which data passes them."""
        first_seed = base_seed if seed_layers else _draw_seed()
        self._first_place = self._find_ties()
        self.layers = nn.ModuleDict()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for chunk in self.own_chunks:
                for index in range(self.parts[chunk], self.parts[chunk + 1]):
                    self._build(index, first_seed, seed_fn or torch.manual_seed)

    def _check(self, ranks: int) -> None:
        problems = []
        if ranks % self.num_stages:
            fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            problems.append(
                f"num_stages: must divide the {ranks} rank(s), got {self.num_stages}; start "
                f"{self.num_stages} ranks or a multiple, or give one of {fitting}"
            )
        if self.activation_checkpoint_interval < 0:
            interval = self.activation_checkpoint_interval
            problems.append(f"activation_checkpoint_interval: must not be negative, got {interval}")
        if self.chunks < 1:
            problems.append(f"chunks: must be at least 1, got {self.chunks}")
        elif self.num_stages * self.chunks > len(self._specs):
            problems.append(
                f"num_stages: must be at most {len(self._specs) // self.chunks} for "
                f"{len(self._specs)} layers in {self.chunks} chunk(s) a rank, got {self.num_stages}"
            )
        if problems:
            raise ConfigError("PipelineModule()", problems)

    def _cut(self, method: str, sample: Any) -> list[int]:
        found = [partition(self._specs, self.num_stages * self.chunks, method, sample)]
        if method.lower() in {"time", "profile"} and dist.is_initialized():
            dist.broadcast_object_list(found)  # clocks differ; rank 0's count
        return found[0]

    @property
    def own_chunks(self) -> list[int]:
        """Places of this rank's chunks among all."""
        return list(range(self.stage_id, self.num_stages * self.chunks, self.num_stages))

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self._specs)

    # -- building -------------------------------------------------------------------------------

    def _find_ties(self) -> dict[int, int]:
        """For each tied layer, the first place of its key."""
        first: dict[str, int] = {}
        found = {}
        for index, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                found[index] = first.setdefault(spec.key, index)
        return found

    def _build(self, index: int, first_seed: int, seed: Callable[[int], Any]) -> None:
        place = self._first_place.get(index, index)
        spec = self._specs[place]
        if str(place) in self.layers:
            return
        if isinstance(spec, LayerSpec):
            seed((first_seed + place) % 2**31)
            layer = spec.build()
        else:
            layer = spec
        if isinstance(layer, nn.Module):
            self.layers[str(place)] = layer
        elif not callable(layer):
            problem = f"layers[{index}]: must build a layer, got {type(layer).__name__}"
            raise ConfigError("PipelineModule()", [problem])
        else:
            self._specs[place] = layer

    def chunk(self, position: int) -> Chunk:
        """Make what runs one of this rank's chunks.

        Args:
            position: Among all chunks.
        """
        places = range(self.parts[position], self.parts[position + 1])
        modules = nn.ModuleDict()
        for index in places:
            name = str(self._first_place.get(index, index))
            if name in self.layers:
                modules[name] = self.layers[name]
        calls = [self._call(index) for index in places]
        if position and getattr(calls[0], "inplace", False):
            calls[0] = _on_copies(calls[0])
        return Chunk(calls, modules, self.activation_checkpoint_interval, self._recompute)

    def end_of(self, position: int) -> str:
        """Name the last layer of a chunk, for messages.

        Args:
            position: Of the chunk, among all.
        """
        index = self.parts[position + 1] - 1
        name, stage = name_of(self._specs[index]), position % self.num_stages
        return f"layers[{index}] ({name}), the last of pipeline stage {stage},"

    def _call(self, index: int) -> Callable[[Any], Any]:
        spec: Any = self._specs[index]
        name = str(self._first_place.get(index, index))
        if name not in self.layers:
            return spec  # type: ignore[no-any-return] # a function
        layer = self.layers[name]
        forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        return layer if forward is None else lambda value: forward(layer, value)

    def read_by_others(self) -> list[nn.Module]:
        """Layers of this rank whose weights a ``forward_fn`` reads in place of their forward."""
        places = {
            str(self._first_place[index])
            for index, spec in enumerate(self._specs)
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
        }
        return [self.layers[place] for place in sorted(places & self.layers.keys())]

    # -- ties -----------------------------------------------------------------------------------

    def prepare(self, mesh: Mesh, interval: int = 0) -> None:
        """Get ready for an engine. **Collective**.

        Args:
            mesh: Of the engine.
            interval: Takes the place of ``activation_checkpoint_interval``, if it is not 0.

        Raises:
            ConfigError: On all ranks, if a stage has nothing to train, or layers that are not tied
                have a parameter in common.
        """
        self.activation_checkpoint_interval = interval or self.activation_checkpoint_interval
        trained = any(parameter.requires_grad for parameter in self.parameters())
        shared = shared_problems(self._modules_here())
        told = mesh.gather_over_model((self.stage_id, trained, shared))
        idle = sorted({at for at, busy, _ in told if not busy}) if self.num_stages > 1 else []
        problems = [
            f"pipeline stage {at}: has no trained parameters (layers {self._layers_of(at)}); "
            "choose another partition_method, or fewer stages"
            for at in idle
        ]
        problems += dict.fromkeys(line for _, _, lines in told for line in lines)
        if problems:
            raise ConfigError("PipelineModule()", problems)
        self._tie(mesh)

    def _modules_here(self) -> Iterator[tuple[int, nn.Module]]:
        """Layers that this rank has built, and those that were given built, with their places."""
        for place, spec in enumerate(self._specs):
            if str(place) in self.layers:
                yield place, self.layers[str(place)]
            elif isinstance(spec, nn.Module):
                yield place, spec

    def recompute_by(self, recompute: Recompute) -> None:
        """Say where the inputs of layers that are computed again wait; before chunks are made."""
        self._recompute = recompute
        self.__dict__.pop("_whole_chunk", None)

    def _layers_of(self, stage: int) -> str:
        step = self.num_stages
        chunks = range(stage, step * self.chunks, step)
        return ", ".join(f"{self.parts[at]} to {self.parts[at + 1] - 1}" for at in chunks)

    def _tie(self, mesh: Mesh) -> None:
        """Make copies of tied layers equal, and mark their parameters. **Collective**."""
        for place, stages in self._tied_over_stages():
            owners = mesh.owners(stages)
            if self.stage_id in stages:
                key = str(getattr(self._specs[place], "key", place))
                for value in self.layers[str(place)].state_dict(keep_vars=True).values():
                    dist.broadcast(value.data, group=owners.group, group_src=0)
                for parameter in self.layers[str(place)].parameters():
                    Tie(key, owners).put_on(parameter)

    def _tied_over_stages(self) -> Iterator[tuple[int, list[int]]]:
        """First places of layers of which several stages have copies, and these stages."""
        for place in sorted(set(self._first_place.values())):
            stages = sorted({self._stage_of(i) for i, p in self._first_place.items() if p == place})
            if len(stages) > 1:
                yield place, stages

    def check_ties(self, moving: Sequence[Tensor]) -> None:
        """Refuse buffers of which the copies of a tied layer would become different.

        Args:
            moving: Buffers of this rank that a forward changes.

        Raises:
            EngineError: If one is of a layer that is tied over several stages.
        """
        changed = {id(value) for value in moving}
        for place, stages in self._tied_over_stages():
            if self.stage_id not in stages:
                continue
            buffers = self.layers[str(place)].named_buffers()
            found = [name for name, value in buffers if id(value) in changed]
            if found:
                key = getattr(self._specs[place], "key", place)
                raise EngineError(
                    f"TiedLayerSpec({key!r}): must have no buffers that a forward changes, as "
                    f"it is tied over the pipeline stages {', '.join(map(str, stages))}, each of "
                    f"which would change its copy in its own way, got {', '.join(found)}; put what "
                    "has them (BatchNorm) into layers of their own, or take a norm without "
                    "(LayerNorm, GroupNorm), or cut so that one stage has all its places"
                )

    def _stage_of(self, index: int) -> int:
        chunk = max(c for c, start in enumerate(self.parts[:-1]) if start <= index)
        return chunk % self.num_stages

    # -- running in one process -----------------------------------------------------------------

    def forward(self, *inputs: Any) -> Any:
        """Run all layers, where one rank has them all.

        Raises:
            EngineError: On a rank that has a part of them.
        """
        if self.num_stages > 1:
            msg = f"PipelineModule: this rank has stage {self.stage_id} of {self.num_stages}; call "
            raise EngineError(f"{msg}train_batch() or eval_batch() of the engine on all ranks")
        return self._whole(*inputs)

    @property
    def _whole(self) -> Chunk:
        found: Chunk | None = self.__dict__.get("_whole_chunk")
        if found is None:  # kept apart from the modules of which it is made
            found = self.__dict__["_whole_chunk"] = self.chunk(0)
        return found


def _on_copies(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Keep a layer from writing to what was received, whose gradient is asked for."""
    return lambda value: call(tree_map_only(Tensor, torch.clone, value))


def _draw_seed() -> int:
    """Draw a seed from the CPU's generator, whatever the default device is, such as meta."""
    return int(torch.randint(2**31, (), device="cpu"))


def _count_stages(num_stages: int | None, topology: Any) -> int:
    said = max(1, int(topology.get_dim("pipe"))) if topology is not None else None
    problems = []
    axes = list(getattr(topology, "axes", ()))
    if axes != [axis for axis in _AXES if axis in axes]:
        problems.append(f"topology: must have axes of {', '.join(_AXES)} in this order, got {axes}")
    if num_stages is None and said is None:
        problems.append("num_stages: is missing; give it or topology")
    elif num_stages is not None and said is not None and num_stages != said:
        problems.append(f"num_stages: must be the topology's {said}, got {num_stages}")
    found = said if num_stages is None else num_stages
    if found is not None and found < 1:
        problems.append(f"num_stages: must be at least 1, got {found}")
    if problems:
        raise ConfigError("PipelineModule()", problems)
    assert found is not None
    return found


def _place() -> tuple[int, int]:
    """Number of ranks and this one's place, before torch.distributed is started too."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
