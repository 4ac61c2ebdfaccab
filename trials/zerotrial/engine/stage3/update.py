"""Updating weights from gradients at stage 3, in two ways.

Elementwise optimizers (Adam, SGD, Lion) update each rank's shards in place. Optimizers that need
full parameters (LAMB, Muon, a user's own) assign each parameter to one rank, which gathers its
gradient, updates a master copy, and scatters the result. This costs 4 / N bytes per parameter, as
much again during the step, and two more collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerotrial.engine.protocols import Piece, Updater, UpdaterInputs
from zerotrial.engine.update.optimizer_states import uncommon_numbers

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator
    from zerotrial.engine.protocols import StageInputs
    from zerotrial.engine.stage3.layout import Layout, Shard

MakeUpdater = Callable[[UpdaterInputs], Updater]


@dataclass(frozen=True)
class _Tile:
    """A range of a bucket that is updated at once."""

    bucket: int
    """Index in the layout."""

    span: slice
    """Elements of the bucket."""

    def part_of(self, shard: Shard) -> tuple[int, int]:
        """Return start and end, in the bucket, of the elements in both shard and tile."""
        start = max(shard.span.start, self.span.start)
        return start, max(start, min(shard.span.stop, self.span.stop))


class ShardUpdate:
    """Updates shards in place by tiles: buckets, split if the configuration limits their size.

    Args:
        inputs: Inputs of the stage.
        layout: Locations of the shards.
        comm: Unused.
        make_updater: Creates the updater, which has the optimizer states.
    """

    def __init__(
        self, inputs: StageInputs, layout: Layout, comm: Communicator, make_updater: MakeUpdater
    ) -> None:
        self._layout = layout
        self._release = inputs.memory.release
        self.full_names: Sequence[Sequence[str]] = ()
        """Names of the parameters in each of the updater's buckets; empty if they are sharded."""
        limit = inputs.config.zero_optimization.sub_group_size
        on_host = inputs.config.zero_optimization.offload_optimizer.device != "none"
        self.separate_masters = on_host and inputs.device.type != "cpu"
        """Whether the updater has separate masters, so that the shards are copies."""
        self._tiles = [
            _Tile(index, slice(start, min(start + length, bucket.master.numel())))
            for index, bucket in enumerate(layout.buckets)
            for length in [min(limit or bucket.master.numel(), bucket.master.numel())]
            for start in range(0, bucket.master.numel(), length)
        ]
        self.updater = make_updater(
            UpdaterInputs(
                masters=[self._master(tile) for tile in self._tiles],
                group_indices=[layout.buckets[tile.bucket].group_index for tile in self._tiles],
                groups=[group.options for group in inputs.groups],
                optimizer_factory=inputs.optimizer_factory,
                config=inputs.config,
                device=inputs.device,
            )
        )

    def _master(self, tile: _Tile) -> Tensor:
        return self._layout.buckets[tile.bucket].master[tile.span]

    def apply(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Update the shards tile by tile.

        Args:
            gradients: Per bucket of the layout, in the layout of its master, or None.
            scale: Factor still to be applied to gradients.
        """
        for index, tile in enumerate(self._tiles):
            master, total = self._master(tile), gradients[tile.bucket]
            gradient = torch.zeros_like(master) if total is None else total[tile.span]
            self.updater.step(index, gradient, scale, master)
            for used in (master, gradient):
                self._release(used)
        self.updater.finish()

    def _parts(self, tile: _Tile) -> list[tuple[str, slice]]:
        """Return the parameters in a tile, with their ranges of it."""
        parts = []
        for shard in self._layout.shards_in[tile.bucket]:
            start, stop = tile.part_of(shard)
            if start < stop:
                parts.append((shard.name, slice(start - tile.span.start, stop - tile.span.start)))
        return parts

    def freeze(self, names: Collection[str]) -> None:
        """Exclude exactly these parameters from all further steps."""
        for index, tile in enumerate(self._tiles):
            self.updater.freeze(index, [part for name, part in self._parts(tile) if name in names])

    def uncommon_numbers(self, scalars: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return numbers of parameters that differ from those of their group."""
        by_name: dict[str, dict[str, float]] = {}
        for index, tile in enumerate(self._tiles):
            group = self._layout.buckets[tile.bucket].group_index
            numbers = self.updater.member_scalars(index)
            by_name |= uncommon_numbers(self._parts(tile), numbers, group, scalars)
        return by_name

    def set_numbers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the result of :meth:`uncommon_numbers`."""
        for index, tile in enumerate(self._tiles):
            for name, part in self._parts(tile):
                if name in states:
                    numbers = {f"group0.{key}": value for key, value in states[name].items()}
                    self.updater.set_member_scalars(index, part, numbers)

    def update_masters(self) -> None:
        """Copy the shards to the masters."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=True) as states:
                states["master"].copy_(self._master(tile))

    def publish(self) -> None:
        """Copy the masters to the shards, unless they share memory."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=False) as states:
                master = self._master(tile)
                if states["master"].data_ptr() != master.data_ptr():
                    master.copy_(states["master"])

    def pieces(self, *, write: bool) -> Iterator[Piece]:
        """Yield one piece for each parameter with elements of this rank in a tile."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=write) as states:
                for shard in self._layout.shards_in[tile.bucket]:
                    start, stop = tile.part_of(shard)
                    if start < stop:
                        part = slice(start - tile.span.start, stop - tile.span.start)
                        tensors = {name: state[part] for name, state in states.items()}
                        first = shard.start + start - shard.offset
                        last = first + stop - start
                        yield Piece(shard.name, shard.parameter.shape, first, last, tensors)
            self._release(self._master(tile))


@dataclass(frozen=True)
class _OwnedParameter:
    """A parameter that this rank updates."""

    shard: Shard
    padded: int
    """Elements of one rank's shard, with padding."""

    start: int
    """First element among this rank's parameters of the bucket."""

    @property
    def span(self) -> slice:
        """Elements of the full parameter there."""
        return slice(self.start, self.start + self.shard.parameter.shape.numel())


class FullParameterUpdate:
    """Updates full parameters, each on the rank that owns it.

    Args:
        inputs: Inputs of the stage.
        layout: Locations of the shards.
        comm: Communicator of the data-parallel ranks.
        make_updater: Creates the updater, which has the optimizer states.
    """

    def __init__(
        self, inputs: StageInputs, layout: Layout, comm: Communicator, make_updater: MakeUpdater
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._device = inputs.device
        self._owned = _assign_parameters(layout, comm)
        self.full_names: Sequence[Sequence[str]] = [
            [owned.shard.name for owned in bucket_owned] for bucket_owned in self._owned
        ]
        masters = []
        for index, bucket in enumerate(layout.buckets):
            buffer = self._gathered(index, bucket.master)
            masters.append(self._concatenate(index, buffer, bucket.master.device))
        self.updater = make_updater(
            UpdaterInputs(
                masters=masters,
                group_indices=[bucket.group_index for bucket in layout.buckets],
                groups=[group.options for group in inputs.groups],
                optimizer_factory=inputs.optimizer_factory,
                config=inputs.config,
                device=inputs.device,
                shapes=[
                    [(w.span.start, w.span.stop, w.shard.parameter.shape) for w in bucket_owned]
                    for bucket_owned in self._owned
                ],
            )
        )

    def apply(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Gather gradients, update this rank's parameters, and scatter them. **Collective**."""
        updated = []
        for index, (bucket, total) in enumerate(zip(self._layout.buckets, gradients, strict=True)):
            gradient = torch.zeros_like(bucket.master) if total is None else total
            full = self._concatenate(index, self._gathered(index, gradient), bucket.master.device)
            # The new weights overwrite the gradient, which saves a buffer.
            self.updater.step(index, full, scale, full)
            updated.append(full)
        self.updater.finish()
        for index, values in enumerate(updated):
            self._scatter(index, values)

    separate_masters = True

    def freeze(self, names: Collection[str]) -> None:
        """Exclude exactly these parameters from all further steps."""
        for index, bucket_owned in enumerate(self._owned):
            self.updater.freeze(
                index, [owned.span for owned in bucket_owned if owned.shard.name in names]
            )

    def uncommon_numbers(self, scalars: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return nothing: the numbers are among the states of full parameters."""
        del scalars
        return {}

    def set_numbers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Do nothing, for the same reason."""

    def update_masters(self) -> None:
        """Gather the shards into the masters. **Collective**."""
        for index, bucket in enumerate(self._layout.buckets):
            gathered = self._gathered(index, bucket.master)
            with self.updater.states(index, write=True) as states:
                full = self._concatenate(index, gathered, states["master"].device)
                states["master"].copy_(full)

    def publish(self) -> None:
        """Scatter the masters to the shards. **Collective**."""
        for index in range(len(self._layout.buckets)):
            with self.updater.states(index, write=False) as states:
                self._scatter(index, states["master"])

    def pieces(self, *, write: bool) -> Iterator[Piece]:
        """Yield one piece for each parameter that this rank owns."""
        for index, bucket_owned in enumerate(self._owned):
            with self.updater.states(index, write=write) as states:
                for owned in bucket_owned:
                    tensors = {name: state[owned.span] for name, state in states.items()}
                    shape = owned.shard.parameter.shape
                    yield Piece(owned.shard.name, shape, 0, shape.numel(), tensors)

    def _gathered(self, index: int, part: Tensor) -> Buffer:
        """Return all ranks' parts of a bucket in sequence."""
        numel = part.numel()
        buffer = self._comm.allocate(self._comm.size * numel, part.dtype, self._device)
        buffer.tensor[self._comm.rank * numel : (self._comm.rank + 1) * numel].copy_(part)
        self._comm.all_gather(buffer).wait()
        return buffer

    def _concatenate(self, index: int, buffer: Buffer, device: torch.device) -> Tensor:
        """Concatenate this rank's parameters from all ranks' parts."""
        rows = buffer.tensor.view(self._comm.size, -1)
        parts = []
        for owned in self._owned[index]:
            begin = owned.shard.offset
            padded = rows[:, begin : begin + owned.padded].reshape(-1)
            parts.append(padded[: owned.shard.parameter.shape.numel()])
        return torch.cat(parts).to(device) if parts else buffer.tensor.new_empty(0, device=device)

    def _scatter(self, index: int, values: Tensor) -> None:
        """Distribute this rank's new weights, and receive its shards of the others'.

        Each element comes from one rank and is zero on all others, so that the sum is exact.
        """
        master = self._layout.buckets[index].master
        numel = master.numel()
        buffer = self._comm.allocate(self._comm.size * numel, master.dtype, self._device)
        rows = buffer.tensor.view(self._comm.size, numel)
        for owned in self._owned[index]:
            length = owned.shard.parameter.shape.numel()
            padded = values.new_zeros(self._comm.size * owned.padded)
            padded[:length] = values[owned.span]
            begin = owned.shard.offset
            rows[:, begin : begin + owned.padded] = padded.view(self._comm.size, -1)
        fresh = torch.empty(numel, dtype=master.dtype, device=self._device)
        self._comm.reduce_scatter(buffer, fresh, 1.0, add=False).wait()
        master.copy_(fresh)


Update = ShardUpdate | FullParameterUpdate
"""Step of a :class:`~zerotrial.engine.stage3.stage.Stage3`."""


def _assign_parameters(layout: Layout, comm: Communicator) -> list[list[_OwnedParameter]]:
    """Assign each parameter to the least loaded rank; return this rank's, by bucket."""
    # Largest first gives an even load. Each rank computes this by itself, so the order must not
    # depend on the rank: names decide between parameters of equal size.
    load = [0] * comm.size
    owner: dict[str, int] = {}
    for shard in sorted(layout.shards, key=lambda s: (-s.parameter.shape.numel(), s.name)):
        rank = load.index(min(load))
        owner[shard.name] = rank
        load[rank] += shard.parameter.shape.numel()
    owned_by_bucket: list[list[_OwnedParameter]] = [[] for _ in layout.buckets]
    for shard in layout.shards:
        if owner[shard.name] == comm.rank:
            at = owned_by_bucket[shard.bucket][-1].span.stop if owned_by_bucket[shard.bucket] else 0
            owned_by_bucket[shard.bucket].append(_OwnedParameter(shard, shard.padded, at))
    return owned_by_bucket
