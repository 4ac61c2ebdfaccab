"""Optimizer states and master weights in a file, one bucket in memory at a time.

S is the number of elements in a bucket's shard. While bucket i is updated, the states of bucket i+1
are read and those of bucket i-1 written, so about three buckets are in memory.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerolab.errors import ConfigError, ZerolabError
from zerotrial.engine.protocols import UpdaterInputs
from zerotrial.engine.update.checkpoint_support import SavableStates
from zerotrial.engine.update.in_memory import cuts_within, is_within, step_scaled
from zerotrial.engine.update.optimizer_states import (
    common_states,
    is_known,
    is_scalar,
    make_states,
    other_states,
    read_scalars,
    set_other_states,
    split_parameter,
    tensor_states,
    write_scalars,
)
from zerotrial.engine.update.paged_file import OffloadError, PagedFile

__all__ = ["NvmeUpdater"]

logger = logging.getLogger(__name__)


@dataclass
class _Record:
    """One kind of tensor of one bucket: in memory, on its way, or only in the file."""

    numel: int
    dtype: torch.dtype
    offset: int | None
    """In the file, bytes; None while no room is taken, for what is the model's own memory."""

    tensor: Tensor | None = None
    """(S,), when in memory."""

    stored: bool = False
    """Whether the file has what ``tensor`` had last."""

    stays: bool = False
    """Whether the tensor is, or may be, the model's own memory, which is never given up."""

    arriving: "Future[Tensor] | None" = None
    leaving: "Future[Tensor] | None" = None


@dataclass
class _Bucket:
    members: list[nn.Parameter]
    """What the optimizer updates; empty while the master is away."""

    spans: list[slice]
    shapes: list[torch.Size]
    records: dict[str, _Record] = field(default_factory=dict)
    """By kind; ``master`` first."""

    held: list[slice] = field(default_factory=list)
    """Elements that steps leave alone."""

    complete: bool = False
    """Whether there is a record of all that the first step makes."""


class NvmeUpdater:
    """See :class:`~zerotrial.engine.protocols.Updater`.

    A master that is the model's own memory (in fp32, and at stage 3) stays there, and the file has
    no room for it: a copy would save nothing. On a GPU the master is a copy, and goes to the file.

    Should a write fail later on, the bucket stays in memory, training goes on, and the write is
    tried again after the next step.

    Raises:
        OffloadError: If the directory cannot hold all states; room is taken here, once.
    """

    def __init__(self, inputs: UpdaterInputs) -> None:
        options = inputs.config.zero_optimization.offload_optimizer
        self._file = PagedFile(Path(str(options.nvme_path)))
        self._buckets = [_bucket_of(inputs, index) for index in range(len(inputs.masters))]
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in inputs.groups]
        for index, bucket in zip(inputs.group_indices, self._buckets, strict=True):
            groups[index]["params"].extend(bucket.members)
        self.optimizer = inputs.optimizer_factory(groups)
        self._members = [
            (index, member)
            for index, bucket in zip(inputs.group_indices, self._buckets, strict=True)
            for member in bucket.members
        ]
        self._savable = SavableStates(
            self.optimizer, self._members, whole=inputs.shapes is not None
        )
        self._unwritten: set[int] = set()
        """Identities of records whose last write failed."""

        try:
            for bucket, master in zip(self._buckets, inputs.masters, strict=True):
                if not _is_in_place(inputs, master):
                    bucket.records["master"].offset = self._file.reserve(master.nbytes)
                self._reserve(bucket)
        except ZerolabError:
            self.close()
            raise

    # -- a step ---------------------------------------------------------------------------------

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard."""
        bucket = self._buckets[index]
        self._bind(bucket)
        self._split(bucket, bucket.held)
        if index + 1 < len(self._buckets):
            self._fetch(self._buckets[index + 1])
        master = bucket.records["master"]
        assert master.tensor is not None
        gradient = gradient.to(master.tensor.device, master.dtype)
        stepped = []
        for member, span, shape in zip(bucket.members, bucket.spans, bucket.shapes, strict=True):
            if not is_within(span, bucket.held):
                member.grad = gradient[span].view(shape)
                stepped.append(member)
        step_scaled(self.optimizer, stepped, scale)
        for member in stepped:
            member.grad = None
        master.stays = publish.data_ptr() == master.tensor.data_ptr()
        if not master.stays:
            publish.copy_(master.tensor)
            if master.offset is None:
                master.offset = self._file.reserve(master.tensor.nbytes)
        self._refuse_other_shapes(bucket)
        self._collect(bucket)
        if index > 0:
            self._settle(self._buckets[index - 1])
        self._send_away(bucket)
        return True

    def freeze(self, index: int, spans: Sequence[slice]) -> None:
        """Exclude elements from all further steps: weights, states and step counts."""
        self._buckets[index].held = list(spans)

    def _split(self, bucket: _Bucket, spans: Sequence[slice]) -> None:
        """See to it that each of the spans is updated apart; the bucket must be bound."""
        for place, span in reversed(list(enumerate(bucket.spans))):
            cuts = cuts_within(span, spans)
            if not cuts:
                continue
            member = bucket.members[place]
            parts = split_parameter(self.optimizer, member, [cut - span.start for cut in cuts])
            bounds = [span.start, *cuts, span.stop]
            bucket.members[place : place + 1] = parts
            bucket.spans[place : place + 1] = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            bucket.shapes[place : place + 1] = [part.shape for part in parts]
            at = next(i for i, (_, known) in enumerate(self._members) if known is member)
            group = self._members[at][0]
            self._members[at : at + 1] = [(group, part) for part in parts]
            self._savable.replace(member, parts, self._members)

    def member_scalars(self, index: int) -> list[tuple[slice, dict[str, float]]]:
        """Return the numbers of the optimizer by part of a bucket's shard."""
        bucket = self._buckets[index]
        return [
            (span, read_scalars(self.optimizer, [(0, member)]))
            for member, span in zip(bucket.members, bucket.spans, strict=True)
        ]

    def set_member_scalars(self, index: int, span: slice, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of :meth:`member_scalars` for the elements of a span."""
        bucket = self._buckets[index]
        if cuts_within(slice(0, bucket.records["master"].numel), [span]):
            self._bind(bucket)
            self._split(bucket, [span])
            self._send_away(bucket)
            self._settle(bucket)
        for member, at in zip(bucket.members, bucket.spans, strict=True):
            if is_within(at, [span]):
                write_scalars(self.optimizer, [(0, member)], scalars)

    def finish(self) -> None:
        """Do nothing: the last bucket is written while training goes on."""

    # -- for checkpoints ------------------------------------------------------------------------

    @contextmanager
    def states(self, index: int, *, write: bool) -> Iterator[Mapping[str, Tensor]]:
        """Yield one bucket's ``master`` and optimizer states, each ``(shard numel,)``."""
        bucket = self._buckets[index]
        yield self._bring(bucket)
        if write:
            self._send_away(bucket)
        self._settle(bucket)
        for record in bucket.records.values():
            self._release(record)

    def other_states(self, scalars: Mapping[str, float]) -> list[list[dict[str, Any]]]:
        """Return numbers alone: optimizers that keep more are refused."""
        self._savable.check_numbers("save_checkpoint()", scalars)
        found = iter([other_states(self.optimizer, member, scalars) for member in self._members])
        return [
            [
                {kind: value for kind, value in next(found).items() if kind not in bucket.records}
                for _ in bucket.members
            ]
            for bucket in self._buckets
        ]

    def set_other_states(self, index: int, place: int, values: Mapping[str, Any]) -> None:
        """Restore one parameter's states; call it after :meth:`set_scalars`."""
        set_other_states(self.optimizer, self._buckets[index].members[place], values)

    def prepare_states(self) -> None:
        """Create the optimizer states as its first step would, so that a load can fill them."""
        for bucket in self._buckets:
            if not self._never_stepped(bucket):
                continue
            self._bind(bucket)
            make_states(self.optimizer, bucket.members)
            self._refuse_other_shapes(bucket)
            self._collect(bucket)
            self._send_away(bucket)
            self._settle(bucket)

    def scalars(self) -> dict[str, float]:
        """Return numbers of the optimizer, e.g. ``group0.step``: one parameter's for its group."""
        return read_scalars(self.optimizer, self._members)

    def set_scalars(self, scalars: Mapping[str, float]) -> None:
        """Restore the result of :meth:`scalars`; call it after :meth:`prepare_states`."""
        write_scalars(self.optimizer, self._members, scalars)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Tensors that are in memory now; see :class:`~zerotrial.engine.protocols.Updater`."""
        kinds: dict[str, list[Tensor]] = {"master": [], "optimizer": list(self._file.borrowable)}
        for bucket in self._buckets:
            for kind, record in bucket.records.items():
                if record.tensor is not None:
                    kinds["master" if kind == "master" else "optimizer"].append(record.tensor)
        return kinds

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    # -- between memory and file ----------------------------------------------------------------

    def _reserve(self, bucket: _Bucket) -> None:
        """Learn which states the optimizer keeps besides the master, and take room for them."""
        before = {member: bool(self.optimizer.state.get(member)) for member in bucket.members}
        make_states(self.optimizer, bucket.members)
        self._refuse_other_shapes(bucket)
        self._collect(bucket)
        if not any(before.values()):  # they are made again by the first step, as it likes them
            for member in bucket.members:
                self.optimizer.state.pop(member, None)
            self._drop_states(bucket)
        bucket.complete = True

    def _refuse_other_shapes(self, bucket: _Bucket) -> None:
        known = is_known(self.optimizer)
        for member in bucket.members:
            by_element = tensor_states(self.optimizer, member)
            for kind, value in self.optimizer.state.get(member, {}).items():
                if is_scalar(value, member):
                    continue
                if kind not in by_element or value.numel() != member.numel():
                    self._refuse(f"keeps {kind!r} in another shape than the parameter's")
                if bucket.complete and kind not in bucket.records and not known:
                    self._refuse(f"makes {kind!r} later than in its first step")
        if common := common_states(self.optimizer):
            keys = ", ".join(map(repr, common))
            self._refuse(f"keeps {keys} under keys that are no parameters")

    def _refuse(self, what: str) -> None:
        problem = (
            "zero_optimization.offload_optimizer.device: must be cpu or none for "
            f"{type(self.optimizer).__name__}, which {what}, as files do not hold it, got nvme"
        )
        raise ConfigError("engine config", [problem])

    def _never_stepped(self, bucket: _Bucket) -> bool:
        return not any(self.optimizer.state.get(member) for member in bucket.members)

    def _fetch(self, bucket: _Bucket) -> None:
        """Start to read what is only in the file."""
        self._settle(bucket)
        if self._never_stepped(bucket):
            self._drop_states(bucket)
        for record in bucket.records.values():
            if record.tensor is None and record.arriving is None and record.stored:
                assert record.offset is not None
                memory = self._file.borrow(record.numel, record.dtype)
                record.arriving = self._file.read(record.offset, memory)

    def _bring(self, bucket: _Bucket) -> dict[str, Tensor]:
        """Return a bucket's tensors, by kind, once they are in memory."""
        self._fetch(bucket)
        found = {}
        for kind, record in bucket.records.items():
            if record.arriving is not None:
                record.tensor, record.arriving = record.arriving.result(), None
            if record.tensor is not None:
                found[kind] = record.tensor
        return found

    def _bind(self, bucket: _Bucket) -> None:
        """Give the optimizer a bucket's tensors."""
        tensors = self._bring(bucket)
        for member, span, shape in zip(bucket.members, bucket.spans, bucket.shapes, strict=True):
            member.data = tensors["master"][span].view(shape)
            for kind, tensor in tensors.items():
                if kind != "master":
                    self.optimizer.state[member][kind] = tensor[span].view(shape)

    def _collect(self, bucket: _Bucket) -> None:
        """Take note of the states that the optimizer has made or put in the place of others."""
        for member, span in zip(bucket.members, bucket.spans, strict=True):
            for kind, state in tensor_states(self.optimizer, member).items():
                record = bucket.records.get(kind)
                if record is None:
                    numel = bucket.records["master"].numel
                    offset = self._file.reserve(numel * state.element_size())
                    record = bucket.records[kind] = _Record(numel, state.dtype, offset)
                if record.tensor is None:
                    whole = len(bucket.members) == 1 and state.numel() == record.numel
                    record.tensor = state.view(-1) if whole else state.new_zeros(record.numel)
                part = record.tensor[span]
                if part.data_ptr() != state.data_ptr():
                    part.copy_(state.view(-1))

    def _send_away(self, bucket: _Bucket) -> None:
        """Take a bucket's tensors from the optimizer, and start to write them."""
        for member in bucket.members:
            for kind in bucket.records:
                if kind != "master" and kind in self.optimizer.state[member]:
                    self.optimizer.state[member][kind] = torch.empty(0)
            if not bucket.records["master"].stays:
                member.data = torch.empty(0)
        for record in bucket.records.values():
            if record.tensor is not None and not record.stays:
                assert record.offset is not None
                record.stored = False
                record.leaving = self._file.write(record.offset, record.tensor)

    def _settle(self, bucket: _Bucket) -> None:
        """Wait until a bucket is written, and use its memory again."""
        for record in bucket.records.values():
            leaving, record.leaving = record.leaving, None
            if leaving is None:
                continue
            try:
                leaving.result()
            except OffloadError as error:
                if not self._unwritten:
                    logger.error("%s; they stay in memory", error)  # noqa: TRY400 - the text says all
                self._unwritten.add(id(record))
            else:
                self._unwritten.discard(id(record))
                record.stored = True
                self._release(record)

    def _release(self, record: _Record) -> None:
        """Use the memory of a tensor again that is in the file."""
        if record.tensor is not None and record.stored and not record.stays:
            self._file.give_back(record.tensor)
            record.tensor = None

    def _drop_states(self, bucket: _Bucket) -> None:
        for kind, record in bucket.records.items():
            if kind == "master":
                continue
            if record.tensor is not None:
                self._file.give_back(record.tensor)
            record.tensor, record.stored = None, False


def _bucket_of(inputs: UpdaterInputs, index: int) -> _Bucket:
    master = inputs.masters[index]
    layout = [(0, master.numel(), master.shape)]
    if inputs.shapes is not None:
        layout = list(inputs.shapes[index])
    host = master if master.device.type == "cpu" else master.cpu()
    members = [nn.Parameter(host[a:b].view(shape)) for a, b, shape in layout]
    bucket = _Bucket(members, [slice(a, b) for a, b, _ in layout], [s for _, _, s in layout])
    # Until the first step says where the weights are published, the master may be the model's own.
    record = _Record(master.numel(), master.dtype, None, tensor=host, stays=True)
    bucket.records["master"] = record
    return bucket


def _is_in_place(inputs: UpdaterInputs, master: Tensor) -> bool:
    """Whether a master is the model's own memory and will stay so.

    What else may turn out to be (batch norms beside a 16-bit model) shows when it is published.
    """
    if master.device.type != "cpu":
        return False
    if inputs.config.zero_optimization.stage == 3:
        return inputs.shapes is None  # whole parameters are put together in memory of their own
    return inputs.config.dtype == "fp32"
