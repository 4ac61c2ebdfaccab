"""From gradients to new weights at stage 3, in either of two ways.

Optimizers whose elements do not know each other (Adam, SGD, Lion) update each rank's shards where
they lie. Those that look at whole parameters (LAMB, Muon, a user's own) get whole parameters: each
belongs to one rank, which gathers its gradient, updates a master copy of it, and scatters the
result. That costs 4 / N bytes for each parameter, as much again while it steps, and two more
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zerotrial.engine.memory.mapped_files import release
from zerotrial.engine.protocols import Piece, Updater, UpdaterInputs
from zerotrial.engine.update.optimizer_states import uncommon_numbers

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Buffer, Communicator
    from zerotrial.engine.protocols import StageInputs
    from zerotrial.engine.stage3.layout import Layout, Shard

MakeUpdater = Callable[[UpdaterInputs], Updater]


class Update(Protocol):
    """What a :class:`~zerotrial.engine.stage3.stage.Stage3` steps with."""

    updater: Updater

    whole_names: Sequence[Sequence[str]]
    """For each of the updater's buckets, the parameters in it; nothing where they are cut."""

    def apply(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Update all shards. **Collective**.

        Args:
            gradients: For each bucket of the layout, laid out like its master, or None.
            scale: What they are still to be multiplied by.
        """
        ...

    masters_apart: bool
    """Whether the updater has masters of its own, and the shards are copies."""

    def update_masters(self) -> None:
        """Bring the updater's masters in line with the shards. **Collective**."""
        ...

    def freeze(self, names: Collection[str]) -> None:
        """Leave these parameters alone in all steps from now on, and no others."""
        ...

    def uncommon_numbers(self, scalars: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return numbers of single parameters that are not those of their group."""
        ...

    def set_numbers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what :meth:`uncommon_numbers` gave."""
        ...

    def publish(self) -> None:
        """Bring the shards in line with the updater's masters. **Collective**."""
        ...

    def pieces(self, *, write: bool) -> Iterator[Piece]:
        """See :meth:`zerotrial.engine.protocols.Stage.pieces`."""
        ...


@dataclass(frozen=True)
class _Tile:
    """What is updated at once."""

    bucket: int
    """Of the layout."""

    span: slice
    """Elements of it."""

    def part_of(self, shard: Shard) -> tuple[int, int]:
        """The first element of the bucket that belongs to both, and one after the last."""
        start = max(shard.span.start, self.span.start)
        return start, max(start, min(shard.span.stop, self.span.stop))


class ShardUpdate:
    """Updates shards where they lie, tile by tile: buckets, cut where the file limits them.

    Args:
        inputs: Of the stage.
        layout: Where the shards lie.
        comm: Not needed here.
        make_updater: Where optimizer states live.
    """

    def __init__(
        self, inputs: StageInputs, layout: Layout, comm: Communicator, make_updater: MakeUpdater
    ) -> None:
        self._layout = layout
        self.whole_names: Sequence[Sequence[str]] = ()
        limit = inputs.config.zero_optimization.sub_group_size
        on_host = inputs.config.zero_optimization.offload_optimizer.device != "none"
        self.masters_apart = on_host and inputs.device.type != "cpu"
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
        """See :class:`Update`."""
        for index, tile in enumerate(self._tiles):
            master, found = self._master(tile), gradients[tile.bucket]
            gradient = torch.zeros_like(master) if found is None else found[tile.span]
            self.updater.step(index, gradient, scale, master)
            for used in (master, gradient):
                release(used)
        self.updater.finish()

    def _parts(self, tile: _Tile) -> list[tuple[str, slice]]:
        """Return the parameters in a tile, with their elements of it."""
        found = []
        for shard in self._layout.shards_in[tile.bucket]:
            start, stop = tile.part_of(shard)
            if start < stop:
                found.append((shard.name, slice(start - tile.span.start, stop - tile.span.start)))
        return found

    def freeze(self, names: Collection[str]) -> None:
        """See :class:`Update`."""
        for index, tile in enumerate(self._tiles):
            self.updater.freeze(index, [part for name, part in self._parts(tile) if name in names])

    def uncommon_numbers(self, scalars: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """See :class:`Update`."""
        found: dict[str, dict[str, float]] = {}
        for index, tile in enumerate(self._tiles):
            group = self._layout.buckets[tile.bucket].group_index
            numbers = self.updater.member_scalars(index)
            found |= uncommon_numbers(self._parts(tile), numbers, group, scalars)
        return found

    def set_numbers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See :class:`Update`."""
        for index, tile in enumerate(self._tiles):
            for name, part in self._parts(tile):
                if name in states:
                    numbers = {f"group0.{key}": value for key, value in states[name].items()}
                    self.updater.set_member_scalars(index, part, numbers)

    def update_masters(self) -> None:
        """See :class:`Update`."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=True) as states:
                states["master"].copy_(self._master(tile))

    def publish(self) -> None:
        """See :class:`Update`."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=False) as states:
                master = self._master(tile)
                if states["master"].data_ptr() != master.data_ptr():
                    master.copy_(states["master"])

    def pieces(self, *, write: bool) -> Iterator[Piece]:
        """See :class:`Update`; one for each parameter that this rank has a part of in a tile."""
        for index, tile in enumerate(self._tiles):
            with self.updater.states(index, write=write) as states:
                for shard in self._layout.shards_in[tile.bucket]:
                    start, stop = tile.part_of(shard)
                    if start < stop:
                        part = slice(start - tile.span.start, stop - tile.span.start)
                        mine = {name: state[part] for name, state in states.items()}
                        first = shard.start + start - shard.offset
                        last = first + stop - start
                        yield Piece(shard.name, shard.parameter.shape, first, last, mine)
            release(self._master(tile))


@dataclass(frozen=True)
class _Whole:
    """A parameter that this rank updates."""

    shard: Shard
    padded: int
    """Elements of one rank's part, with padding."""

    start: int
    """Where it begins among those that this rank updates of the same bucket."""

    @property
    def span(self) -> slice:
        """Of the whole parameter."""
        return slice(self.start, self.start + self.shard.parameter.shape.numel())


class WholeUpdate:
    """Updates whole parameters, each on the rank that it belongs to.

    Args:
        inputs: Of the stage.
        layout: Where the shards lie.
        comm: Between the data-parallel ranks.
        make_updater: Where optimizer states live.
    """

    def __init__(
        self, inputs: StageInputs, layout: Layout, comm: Communicator, make_updater: MakeUpdater
    ) -> None:
        self._layout = layout
        self._comm = comm
        self._device = inputs.device
        self._mine = _divide(layout, comm)
        self.whole_names: Sequence[Sequence[str]] = [
            [whole.shard.name for whole in mine] for mine in self._mine
        ]
        masters = []
        for index, bucket in enumerate(layout.buckets):
            buffer = self._gathered(index, bucket.master)
            masters.append(self._collect(index, buffer, bucket.master.device))
        self.updater = make_updater(
            UpdaterInputs(
                masters=masters,
                group_indices=[bucket.group_index for bucket in layout.buckets],
                groups=[group.options for group in inputs.groups],
                optimizer_factory=inputs.optimizer_factory,
                config=inputs.config,
                device=inputs.device,
                shapes=[
                    [(w.span.start, w.span.stop, w.shard.parameter.shape) for w in mine]
                    for mine in self._mine
                ],
            )
        )

    def apply(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """See :class:`Update`."""
        fresh = []
        for index, (bucket, found) in enumerate(zip(self._layout.buckets, gradients, strict=True)):
            gradient = torch.zeros_like(bucket.master) if found is None else found
            whole = self._collect(index, self._gathered(index, gradient), bucket.master.device)
            # New weights take the place of the gradient that they were made from.
            self.updater.step(index, whole, scale, whole)
            fresh.append(whole)
        self.updater.finish()
        for index, values in enumerate(fresh):
            self._scatter(index, values)

    masters_apart = True

    def freeze(self, names: Collection[str]) -> None:
        """See :class:`Update`."""
        for index, mine in enumerate(self._mine):
            self.updater.freeze(index, [whole.span for whole in mine if whole.shard.name in names])

    def uncommon_numbers(self, scalars: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """See :class:`Update`: they are among the states of whole parameters."""
        del scalars
        return {}

    def set_numbers(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """See :class:`Update`: nothing to do, for the same reason."""

    def update_masters(self) -> None:
        """See :class:`Update`."""
        for index, bucket in enumerate(self._layout.buckets):
            gathered = self._gathered(index, bucket.master)
            with self.updater.states(index, write=True) as states:
                whole = self._collect(index, gathered, states["master"].device)
                states["master"].copy_(whole)

    def publish(self) -> None:
        """See :class:`Update`."""
        for index in range(len(self._layout.buckets)):
            with self.updater.states(index, write=False) as states:
                self._scatter(index, states["master"])

    def pieces(self, *, write: bool) -> Iterator[Piece]:
        """See :class:`Update`; one for each parameter that belongs to this rank."""
        for index, mine in enumerate(self._mine):
            with self.updater.states(index, write=write) as states:
                for whole in mine:
                    tensors = {name: state[whole.span] for name, state in states.items()}
                    shape = whole.shard.parameter.shape
                    yield Piece(whole.shard.name, shape, 0, shape.numel(), tensors)

    def _gathered(self, index: int, part: Tensor) -> Buffer:
        """Every rank's part of a bucket, one after the other."""
        numel = part.numel()
        buffer = self._comm.allocate(self._comm.size * numel, part.dtype, self._device)
        buffer.tensor[self._comm.rank * numel : (self._comm.rank + 1) * numel].copy_(part)
        self._comm.all_gather(buffer).wait()
        return buffer

    def _collect(self, index: int, buffer: Buffer, device: torch.device) -> Tensor:
        """Put the parameters that belong to this rank together from all ranks' parts."""
        rows = buffer.tensor.view(self._comm.size, -1)
        parts = []
        for whole in self._mine[index]:
            begin = whole.shard.offset
            broadcast_masters = rows[:, begin : begin + whole.padded].reshape(-1)
            parts.append(broadcast_masters[: whole.shard.parameter.shape.numel()])
        return torch.cat(parts).to(device) if parts else buffer.tensor.new_empty(0, device=device)

    def _scatter(self, index: int, values: Tensor) -> None:
        """Give every rank its part of what this rank has updated, and take its own of the rest.

        Each element comes from one rank and is zero on all others, so that the sum is exact.
        """
        master = self._layout.buckets[index].master
        numel = master.numel()
        buffer = self._comm.allocate(self._comm.size * numel, master.dtype, self._device)
        rows = buffer.tensor.view(self._comm.size, numel)
        for whole in self._mine[index]:
            length = whole.shard.parameter.shape.numel()
            broadcast_masters = values.new_zeros(self._comm.size * whole.padded)
            broadcast_masters[:length] = values[whole.span]
            begin = whole.shard.offset
            rows[:, begin : begin + whole.padded] = broadcast_masters.view(self._comm.size, -1)
        fresh = torch.empty(numel, dtype=master.dtype, device=self._device)
        self._comm.reduce_scatter(buffer, fresh, 1.0, add=False).wait()
        master.copy_(fresh)


def _divide(layout: Layout, comm: Communicator) -> list[list[_Whole]]:
    """Give each parameter to the rank that has least so far; returns this rank's, by bucket."""
    load = [0] * comm.size
    owner: dict[str, int] = {}
    for shard in sorted(layout.shards, key=lambda s: (-s.parameter.shape.numel(), s.name)):
        rank = load.index(min(load))
        owner[shard.name] = rank
        load[rank] += shard.parameter.shape.numel()
    mine: list[list[_Whole]] = [[] for _ in layout.buckets]
    for shard in layout.shards:
        if owner[shard.name] == comm.rank:
            at = mine[shard.bucket][-1].span.stop if mine[shard.bucket] else 0
            mine[shard.bucket].append(_Whole(shard, shard.padded, at))
    return mine
