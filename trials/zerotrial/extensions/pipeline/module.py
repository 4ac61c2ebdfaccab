"""PipelineModule: a model as a list of layers, of which each rank builds and runs a part.

::

    layers       0  1  2 | 3  4 | 5  6 | 7          4 chunks
    ranks        0       | 1    | 0    | 1          2 pipeline stages, 2 chunks on each rank

Parameters are named by the index of their layer in the model (``layers.5.weight``), so that
checkpoints do not depend on the partition. A tied layer is named by its first index. A layer's
initial values depend on its index, and not on the number of stages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.errors import ConfigError, EngineError
from zerolab.registry import PARTS
from zerotrial.engine.builder.activation_checkpointing import Recompute, recomputed
from zerotrial.engine.builder.environment import current_planner
from zerotrial.engine.mesh import Mesh, Tie
from zerotrial.extensions.pipeline.layers import (
    Layer,
    LayerSpec,
    TiedLayerSpec,
    check_layers,
    name_of,
    shared_problems,
)
from zerotrial.extensions.pipeline.partitioning import partition

__all__ = ["Chunk", "PipelineModule"]

_AXES = ("pipe", "data", "model")
"""Axes of a topology, in the order in which ranks are laid out."""


class Chunk(nn.Module):
    """Consecutive layers on one rank.

    Args:
        calls: Calls of the layers, in order.
        layers: Layers that are modules, by their indices in the model.
        interval: Number of layers recomputed together in backward; 0 keeps all activations.
        recompute: Wrapper that recomputes layers. The chunk's own input is always kept in
            place, because it is needed to send its gradient back.
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
        self._recomputed_calls = [
            recompute(part) if index else recomputed(part) for index, part in enumerate(parts)
        ]

    def forward(self, *inputs: Any) -> Any:
        """Run the layers; several inputs are one tuple for the first layer of the model."""
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        return _run(self._recomputed_calls or self._calls, value)


def _run(calls: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for call in calls:
        value = call(value)
    return value


class PipelineModule(nn.Module):
    """Model divided into pipeline stages; :func:`zerotrial.initialize` returns an engine for it.

    Args:
        layers: Specifications, modules or functions, in any iterable, such as ``nn.ModuleList``.
            The output of each is the input of the next: a tensor, or a tuple of tensors.
        num_stages: Number of pipeline stages; the number of ranks must be a multiple.
        topology: Alternative to ``num_stages``: an object with ``get_dim("pipe")``.
        loss_fn: Called with the last output and the labels, returns the mean over the
            micro-batch; None: the last layer's output is the loss.
        seed_layers: Seed each layer with ``base_seed`` and its index. Otherwise the seed is drawn
            from torch's generator, once for all layers.
        seed_fn: Called with a layer's seed before it is built; ``torch.manual_seed`` by default.
        base_seed: See ``seed_layers``.
        partition_method: See :func:`zerotrial.engine.pipeline.partition`.
        activation_checkpoint_interval: Number of layers recomputed together in backward; 0
            keeps all activations.
        chunks: Chunks of the model per rank, for the interleaved and zero-bubble schedules.
        sample: Input of the first layer, for ``partition_method="time"``.

    Raises:
        ConfigError: With all problems of the arguments.

    Example:
        One stage on one rank; with ``num_stages=2`` start at least two ranks:

        >>> layers = [zerotrial.LayerSpec(torch.nn.Linear, 4, 4), torch.nn.ReLU()]
        >>> model = zerotrial.PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss())
        >>> config = {"train_batch_size": 8, "gradient_accumulation_steps": 2,
        ...           "optimizer": {"type": "Adam"}}
        >>> engine, *_ = zerotrial.initialize(model=model, config=config)
        >>> batches = [(torch.zeros(4, 4), torch.zeros(4, 4)) for _ in range(2)]
        >>> engine.train_batch(iter(batches)).shape
        torch.Size([])
    """

    has_pipeline_stages: ClassVar[bool] = True
    """Selects the engine of pipelines."""

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
        requested = _count_stages(num_stages, topology)
        self.requested_stages = requested
        """Requested number of pipeline stages, even if built as one stage."""
        self.num_stages = requested if current_planner() is None else 1
        self.loss_fn = loss_fn
        self.requested_chunks = chunks
        """Requested chunks per rank, for several stages."""
        self.chunks = chunks if self.num_stages > 1 else 1
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self._recompute: Recompute = recomputed
        ranks, rank = _rank_position()
        self._check(ranks)
        self.stage_id = rank // (ranks // self.num_stages)
        """Pipeline stage of this rank."""
        self.parts = self._boundaries(partition_method, sample)
        """Boundaries of the chunks of all ranks, in the order in which data passes them."""
        first_seed = base_seed if seed_layers else _draw_seed()
        self._first_indices = self._find_ties()
        self.layers = nn.ModuleDict()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for chunk in self.own_chunks:
                for index in range(self.parts[chunk], self.parts[chunk + 1]):
                    self._build(index, first_seed, seed_fn or torch.manual_seed)

    @property
    def reads_data(self) -> bool:
        """Whether this rank has the first or the last stage."""
        return self.stage_id in (0, self.num_stages - 1)

    def check_config(self, config: EngineConfig, steps: int) -> None:
        """Raise for settings that a pipeline does not support.

        Raises:
            ConfigError: With all problems.
        """
        settings, stages = config.pipeline, self.num_stages
        rules, problems = PARTS["pipeline_rules"], []
        if settings.stages is not None and settings.stages != stages:
            problems.append(
                f"pipeline.stages: must be the PipelineModule's {stages}, got {settings.stages}"
            )
        if stages > 1:
            problems += [problem for _, problem in rules.pipeline_checks(config, stages)]
            problems += rules.schedule_problems(
                settings.schedule, stages, steps, chunks=self.chunks
            )
        elif unmanaged := rules.unmanaged_problem(config):
            problems.append(unmanaged)
        if problems:
            raise ConfigError(config.source, problems)

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

    def _boundaries(self, method: str, sample: Any) -> list[int]:
        boundaries = [partition(self._specs, self.num_stages * self.chunks, method, sample)]
        if method.lower() in {"time", "profile"} and dist.is_initialized():
            dist.broadcast_object_list(
                boundaries
            )  # timings differ between ranks; rank 0's are used
        return boundaries[0]

    @property
    def own_chunks(self) -> list[int]:
        """Positions of this rank's chunks."""
        return list(range(self.stage_id, self.num_stages * self.chunks, self.num_stages))

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self._specs)

    # -- building -------------------------------------------------------------------------------

    def _find_ties(self) -> dict[int, int]:
        """Return the first index of the key for each tied layer."""
        first: dict[str, int] = {}
        firsts = {}
        for index, spec in enumerate(self._specs):
            if isinstance(spec, TiedLayerSpec):
                firsts[index] = first.setdefault(spec.key, index)
        return firsts

    def _build(self, index: int, first_seed: int, seed: Callable[[int], Any]) -> None:
        first_index = self._first_indices.get(index, index)
        spec = self._specs[first_index]
        if str(first_index) in self.layers:
            return
        if isinstance(spec, LayerSpec):
            seed((first_seed + first_index) % 2**31)
            layer = spec.build()
        else:
            layer = spec
        if isinstance(layer, nn.Module):
            self.layers[str(first_index)] = layer
        elif not callable(layer):
            problem = f"layers[{index}]: must build a layer, got {type(layer).__name__}"
            raise ConfigError("PipelineModule()", [problem])
        else:
            self._specs[first_index] = layer

    def chunk(self, position: int) -> Chunk:
        """Return a module that runs one of this rank's chunks."""
        indices = range(self.parts[position], self.parts[position + 1])
        modules = nn.ModuleDict()
        for index in indices:
            name = str(self._first_indices.get(index, index))
            if name in self.layers:
                modules[name] = self.layers[name]
        calls = [self._call(index) for index in indices]
        if position and getattr(calls[0], "inplace", False):
            calls[0] = _on_copies(calls[0])
        return Chunk(calls, modules, self.activation_checkpoint_interval, self._recompute)

    def end_of(self, position: int) -> str:
        """Return a description of the last layer of a chunk, for errors.

        Args:
            position: Position among all chunks.
        """
        index = self.parts[position + 1] - 1
        name, stage = name_of(self._specs[index]), position % self.num_stages
        return f"layers[{index}] ({name}), the last of pipeline stage {stage},"

    def _call(self, index: int) -> Callable[[Any], Any]:
        spec: Any = self._specs[index]
        name = str(self._first_indices.get(index, index))
        if name not in self.layers:
            return spec  # type: ignore[no-any-return] # a function
        layer = self.layers[name]
        forward = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
        return layer if forward is None else lambda value: forward(layer, value)

    def read_by_others(self) -> list[nn.Module]:
        """Return layers of this rank whose weights a ``forward_fn`` reads directly."""
        names = {
            str(self._first_indices[index])
            for index, spec in enumerate(self._specs)
            if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
        }
        return [self.layers[name] for name in sorted(names & self.layers.keys())]

    # -- ties -----------------------------------------------------------------------------------

    def prepare(self, mesh: Mesh, interval: int = 0) -> None:
        """Prepare the module for an engine. **Collective**.

        Args:
            mesh: The engine's mesh.
            interval: Replaces ``activation_checkpoint_interval``, unless 0.

        Raises:
            ConfigError: On all ranks, if a stage has no trained parameters, or layers that are
                not tied share a parameter.
        """
        self.activation_checkpoint_interval = interval or self.activation_checkpoint_interval
        trained = any(parameter.requires_grad for parameter in self.parameters())
        shared = shared_problems(self._modules_here())
        gathered = mesh.gather_over_model((self.stage_id, trained, shared))
        idle = (
            sorted({stage for stage, busy, _ in gathered if not busy})
            if self.num_stages > 1
            else []
        )
        problems = [
            f"pipeline stage {stage}: has no trained parameters (layers {self._layers_of(stage)}); "
            "choose another partition_method, or fewer stages"
            for stage in idle
        ]
        problems += dict.fromkeys(line for _, _, lines in gathered for line in lines)
        if problems:
            raise ConfigError("PipelineModule()", problems)
        self._tie(mesh)

    def _modules_here(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield indices and layers, built by this rank or passed as modules."""
        for index, spec in enumerate(self._specs):
            if str(index) in self.layers:
                yield index, self.layers[str(index)]
            elif isinstance(spec, nn.Module):
                yield index, spec

    def set_recompute(self, recompute: Recompute) -> None:
        """Set the wrapper that recomputes layers, before chunks are built."""
        self._recompute = recompute
        self.__dict__.pop("_whole_chunk", None)

    def _layers_of(self, stage: int) -> str:
        step = self.num_stages
        chunks = range(stage, step * self.chunks, step)
        return ", ".join(f"{self.parts[chunk]} to {self.parts[chunk + 1] - 1}" for chunk in chunks)

    def _tie(self, mesh: Mesh) -> None:
        """Synchronize copies of tied layers, and mark their parameters. **Collective**."""
        for index, stages in self._tied_over_stages():
            owners = mesh.owners(stages)
            if self.stage_id in stages:
                key = str(getattr(self._specs[index], "key", index))
                for value in self.layers[str(index)].state_dict(keep_vars=True).values():
                    dist.broadcast(value.data, group=owners.group, group_src=0)
                for parameter in self.layers[str(index)].parameters():
                    Tie(key, owners).put_on(parameter)

    def _tied_over_stages(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the first index of each layer with copies on several stages, and these stages."""
        for first_index in sorted(set(self._first_indices.values())):
            stages = sorted(
                {self._stage_of(i) for i, p in self._first_indices.items() if p == first_index}
            )
            if len(stages) > 1:
                yield first_index, stages

    def check_ties(self, moving: Sequence[Tensor]) -> None:
        """Check that no buffer makes copies of a tied layer differ.

        Args:
            moving: Buffers of this rank that a forward changes.

        Raises:
            EngineError: If one belongs to a layer that is tied over several stages.
        """
        changed = {id(value) for value in moving}
        for index, stages in self._tied_over_stages():
            if self.stage_id not in stages:
                continue
            buffers = self.layers[str(index)].named_buffers()
            names = [name for name, value in buffers if id(value) in changed]
            if names:
                key = getattr(self._specs[index], "key", index)
                raise EngineError(
                    f"TiedLayerSpec({key!r}): must have no buffers that a forward changes, as "
                    f"it is tied over the pipeline stages {', '.join(map(str, stages))}, each of "
                    f"which would change its copy differently, got {', '.join(names)}; move "
                    "them (BatchNorm) to separate layers, use a norm without them (LayerNorm, "
                    "GroupNorm), or change the stage boundaries so that one stage has all its "
                    "layers"
                )

    def _stage_of(self, index: int) -> int:
        chunk = max(c for c, start in enumerate(self.parts[:-1]) if start <= index)
        return chunk % self.num_stages

    # -- running in one process -----------------------------------------------------------------

    def forward(self, *inputs: Any) -> Any:
        """Run all layers of a model with one stage.

        Args:
            inputs: Input of the first layer.

        Returns:
            Output of the last layer.

        Raises:
            EngineError: If the model has several stages; use ``engine.eval_batch`` then.

        Example:
            >>> model = zerotrial.PipelineModule([torch.nn.ReLU()], num_stages=1)
            >>> model(torch.tensor([-1.0, 1.0]))
            tensor([0., 1.])
        """
        if self.num_stages > 1:
            msg = f"PipelineModule: this rank has stage {self.stage_id} of {self.num_stages}; call "
            raise EngineError(f"{msg}train_batch() or eval_batch() of the engine on all ranks")
        return self._full_chunk(*inputs)

    @property
    def _full_chunk(self) -> Chunk:
        chunk: Chunk | None = self.__dict__.get("_whole_chunk")
        if chunk is None:  # not registered as a submodule
            chunk = self.__dict__["_whole_chunk"] = self.chunk(0)
        return chunk


def _on_copies(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap an in-place layer: the received tensor is needed for its gradient."""
    return lambda value: call(tree_map_only(Tensor, torch.clone, value))


def _draw_seed() -> int:
    """Draw a seed from the CPU's generator, even if the default device is meta."""
    return int(torch.randint(2**31, (), device="cpu"))


def _count_stages(num_stages: int | None, topology: Any) -> int:
    topology_stages = max(1, int(topology.get_dim("pipe"))) if topology is not None else None
    problems = []
    axes = list(getattr(topology, "axes", ()))
    if axes != [axis for axis in _AXES if axis in axes]:
        problems.append(f"topology: must have axes of {', '.join(_AXES)} in this order, got {axes}")
    if num_stages is None and topology_stages is None:
        problems.append("num_stages: is missing; give it or topology")
    elif num_stages is not None and topology_stages is not None and num_stages != topology_stages:
        problems.append(f"num_stages: must be the topology's {topology_stages}, got {num_stages}")
    count = topology_stages if num_stages is None else num_stages
    if count is not None and count < 1:
        problems.append(f"num_stages: must be at least 1, got {count}")
    if problems:
        raise ConfigError("PipelineModule()", problems)
    assert count is not None
    return count


def _rank_position() -> tuple[int, int]:
    """Return the number of ranks and this rank, even before torch.distributed starts."""
    if dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
