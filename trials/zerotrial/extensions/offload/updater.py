"""Optimizer states and master weights in a file, one bucket in memory at a time.

S is the number of elements in a bucket's shard. While bucket i is updated, the states of bucket i+1
are read and those of bucket i-1 written, so about three buckets are in memory.
"""

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
from zerotrial.engine.update.in_memory import UpdaterBase, cuts_within, is_within, step_scaled
from zerotrial.engine.update.optimizer_states import (
    common_states,
    is_known,
    is_scalar,
    make_states,
    other_states,
    tensor_states,
    write_scalars,
)
from zerotrial.extensions.offload.paged_file import OffloadError, PagedFile

__all__ = ["NvmeUpdater"]

logger = logging.getLogger(__name__)


@dataclass
class _Record:
    """One kind of tensor of one bucket: in memory, in transfer, or only in the file."""

    numel: int
    dtype: torch.dtype
    offset: int | None
    """Offset in the file in bytes; None while no room is reserved, for the model's memory."""

    tensor: Tensor | None = None
    """(S,) The tensor, if it is in memory."""

    stored: bool = False
    """Whether the file has the current content of ``tensor``."""

    in_model: bool = False
    """Whether the tensor is, or may be, the model's memory, which is never released."""

    read_future: "Future[Tensor] | None" = None
    write_future: "Future[Tensor] | None" = None


@dataclass
class _Bucket:
    members: list[nn.Parameter]
    """Parameters of the optimizer; empty tensors while the master is in the file."""

    spans: list[slice]
    shapes: list[torch.Size]
    records: dict[str, _Record] = field(default_factory=dict)
    """Records by kind; ``master`` first."""

    complete: bool = False
    """Whether all states of the first step have a record."""


class NvmeUpdater(UpdaterBase):
    """Updater with states in a file, see the protocol ``Updater``.

    A master that is the model's memory (in fp32, and at stage 3) stays there without room in the
    file: a copy would save nothing. On a GPU the master is a copy, which goes to the file.

    If a write fails later, the bucket stays in memory, training continues, and the write is retried
    after the next step.

    Raises:
        OffloadError: If the directory lacks room for all states, which is reserved here.
    """

    def __init__(self, inputs: UpdaterInputs) -> None:
        options = inputs.config.zero_optimization.offload_optimizer
        self._file = PagedFile(Path(str(options.nvme_path)))
        self._buckets = [_bucket_of(inputs, index) for index in range(len(inputs.masters))]
        self._full_parameters = inputs.shapes is not None
        members = [bucket.members for bucket in self._buckets]
        self._build(inputs, members, [bucket.spans for bucket in self._buckets])
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
        self._attach(bucket)
        self._split(index, self._frozen[index])
        if index + 1 < len(self._buckets):
            self._fetch(self._buckets[index + 1])
        master = bucket.records["master"]
        assert master.tensor is not None
        gradient = gradient.to(master.tensor.device, master.dtype)
        stepped = []
        for member, span, shape in zip(bucket.members, bucket.spans, bucket.shapes, strict=True):
            if not is_within(span, self._frozen[index]):
                member.grad = gradient[span].view(shape)
                stepped.append(member)
        step_scaled(self.optimizer, stepped, scale)
        for member in stepped:
            member.grad = None
        master.in_model = publish.data_ptr() == master.tensor.data_ptr()
        if not master.in_model:
            publish.copy_(master.tensor)
            if master.offset is None:
                master.offset = self._file.reserve(master.tensor.nbytes)
        self._refuse_other_shapes(bucket)
        self._record_states(bucket)
        if index > 0:
            self._finish_write(self._buckets[index - 1])
        self._write_back(bucket)
        return True

    def freeze(self, index: int, spans: Sequence[slice]) -> None:
        """Exclude elements from all further steps: weights, states and step counts."""
        self._frozen[index] = list(spans)

    def _split(self, index: int, spans: Sequence[slice]) -> None:
        """Make the optimizer update each span separately; the bucket must be attached."""
        super()._split(index, spans)
        bucket = self._buckets[index]
        bucket.shapes[:] = [member.shape for member in bucket.members]

    def set_member_scalars(self, index: int, span: slice, scalars: Mapping[str, float]) -> None:
        """Restore the numbers of :meth:`member_scalars` for the elements of a span."""
        bucket = self._buckets[index]
        if cuts_within(slice(0, bucket.records["master"].numel), [span]):
            self._attach(bucket)
            self._split(index, [span])
            self._write_back(bucket)
            self._finish_write(bucket)
        for member, member_span in zip(bucket.members, bucket.spans, strict=True):
            if is_within(member_span, [span]):
                write_scalars(self.optimizer, [(0, member)], scalars)

    def finish(self) -> None:
        """Do nothing: the last bucket is written in the background."""

    # -- for checkpoints ------------------------------------------------------------------------

    @contextmanager
    def states(self, index: int, *, write: bool) -> Iterator[Mapping[str, Tensor]]:
        """Yield one bucket's ``master`` and optimizer states, each ``(shard numel,)``."""
        bucket = self._buckets[index]
        yield self._load(bucket)
        if write:
            self._write_back(bucket)
        self._finish_write(bucket)
        for record in bucket.records.values():
            self._release(record)

    def other_states(self, scalars: Mapping[str, float]) -> list[list[dict[str, Any]]]:
        """Return numbers only: optimizers with other states are rejected."""
        self._savable.check_numbers("save_checkpoint()", scalars)
        states = iter([other_states(self.optimizer, member, scalars) for member in self._members])
        return [
            [
                {kind: value for kind, value in next(states).items() if kind not in bucket.records}
                for _ in bucket.members
            ]
            for bucket in self._buckets
        ]

    def prepare_states(self) -> None:
        """Create the optimizer states as its first step would, so that a load can fill them."""
        for bucket in self._buckets:
            if not self._never_stepped(bucket):
                continue
            self._attach(bucket)
            make_states(self.optimizer, bucket.members)
            self._refuse_other_shapes(bucket)
            self._record_states(bucket)
            self._write_back(bucket)
            self._finish_write(bucket)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return the tensors that are in memory now, by kind."""
        kinds: dict[str, list[Tensor]] = {"master": [], "optimizer": list(self._file.free_memory)}
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
        """Find the optimizer's states other than the master, and reserve room for them."""
        before = {member: bool(self.optimizer.state.get(member)) for member in bucket.members}
        make_states(self.optimizer, bucket.members)
        self._refuse_other_shapes(bucket)
        self._record_states(bucket)
        if not any(before.values()):  # the first step creates them again with its own values
            for member in bucket.members:
                self.optimizer.state.pop(member, None)
            self._drop_states(bucket)
        bucket.complete = True

    def _refuse_other_shapes(self, bucket: _Bucket) -> None:
        is_trusted = is_known(self.optimizer)
        for member in bucket.members:
            by_element = tensor_states(self.optimizer, member)
            for kind, value in self.optimizer.state.get(member, {}).items():
                if is_scalar(value, member):
                    continue
                if kind not in by_element or value.numel() != member.numel():
                    self._refuse(f"keeps {kind!r} in another shape than the parameter's")
                if bucket.complete and kind not in bucket.records and not is_trusted:
                    self._refuse(f"makes {kind!r} later than in its first step")
        if common := common_states(self.optimizer):
            keys = ", ".join(map(repr, common))
            self._refuse(f"keeps {keys} under keys that are no parameters")

    def _refuse(self, reason: str) -> None:
        problem = (
            "zero_optimization.offload_optimizer.device: must be cpu or none for "
            f"{type(self.optimizer).__name__}, which {reason}, as files do not hold it, got nvme"
        )
        raise ConfigError("engine config", [problem])

    def _never_stepped(self, bucket: _Bucket) -> bool:
        return not any(self.optimizer.state.get(member) for member in bucket.members)

    def _fetch(self, bucket: _Bucket) -> None:
        """Start reading tensors that are only in the file."""
        self._finish_write(bucket)
        if self._never_stepped(bucket):
            self._drop_states(bucket)
        for record in bucket.records.values():
            if record.tensor is None and record.read_future is None and record.stored:
                assert record.offset is not None
                memory = self._file.acquire(record.numel, record.dtype)
                record.read_future = self._file.read(record.offset, memory)

    def _load(self, bucket: _Bucket) -> dict[str, Tensor]:
        """Return a bucket's tensors by kind, when they are in memory."""
        self._fetch(bucket)
        tensors = {}
        for kind, record in bucket.records.items():
            if record.read_future is not None:
                record.tensor, record.read_future = record.read_future.result(), None
            if record.tensor is not None:
                tensors[kind] = record.tensor
        return tensors

    def _attach(self, bucket: _Bucket) -> None:
        """Attach a bucket's tensors to the optimizer."""
        tensors = self._load(bucket)
        for member, span, shape in zip(bucket.members, bucket.spans, bucket.shapes, strict=True):
            member.data = tensors["master"][span].view(shape)
            for kind, tensor in tensors.items():
                if kind != "master":
                    self.optimizer.state[member][kind] = tensor[span].view(shape)

    def _record_states(self, bucket: _Bucket) -> None:
        """Record states that the optimizer has created or replaced."""
        for member, span in zip(bucket.members, bucket.spans, strict=True):
            for kind, state in tensor_states(self.optimizer, member).items():
                record = bucket.records.get(kind)
                if record is None:
                    numel = bucket.records["master"].numel
                    offset = self._file.reserve(numel * state.element_size())
                    record = bucket.records[kind] = _Record(numel, state.dtype, offset)
                if record.tensor is None:
                    is_single = len(bucket.members) == 1 and state.numel() == record.numel
                    record.tensor = state.view(-1) if is_single else state.new_zeros(record.numel)
                part = record.tensor[span]
                if part.data_ptr() != state.data_ptr():
                    part.copy_(state.view(-1))

    def _write_back(self, bucket: _Bucket) -> None:
        """Detach a bucket's tensors from the optimizer, and start writing them."""
        for member in bucket.members:
            for kind in bucket.records:
                if kind != "master" and kind in self.optimizer.state[member]:
                    self.optimizer.state[member][kind] = torch.empty(0)
            if not bucket.records["master"].in_model:
                member.data = torch.empty(0)
        for record in bucket.records.values():
            if record.tensor is not None and not record.in_model:
                assert record.offset is not None
                record.stored = False
                record.write_future = self._file.write(record.offset, record.tensor)

    def _finish_write(self, bucket: _Bucket) -> None:
        """Wait until a bucket is written, then release its memory."""
        for record in bucket.records.values():
            write_future, record.write_future = record.write_future, None
            if write_future is None:
                continue
            try:
                write_future.result()
            except OffloadError as error:
                if not self._unwritten:
                    logger.error("%s; they stay in memory", error)  # noqa: TRY400 - the text is complete
                self._unwritten.add(id(record))
            else:
                self._unwritten.discard(id(record))
                record.stored = True
                self._release(record)

    def _release(self, record: _Record) -> None:
        """Release the memory of a tensor that is in the file."""
        if record.tensor is not None and record.stored and not record.in_model:
            self._file.release(record.tensor)
            record.tensor = None

    def _drop_states(self, bucket: _Bucket) -> None:
        for kind, record in bucket.records.items():
            if kind == "master":
                continue
            if record.tensor is not None:
                self._file.release(record.tensor)
            record.tensor, record.stored = None, False


def _bucket_of(inputs: UpdaterInputs, index: int) -> _Bucket:
    master = inputs.masters[index]
    layout = [(0, master.numel(), master.shape)]
    if inputs.shapes is not None:
        layout = list(inputs.shapes[index])
    host = master if master.device.type == "cpu" else master.cpu()
    members = [nn.Parameter(host[a:b].view(shape)) for a, b, shape in layout]
    bucket = _Bucket(members, [slice(a, b) for a, b, _ in layout], [s for _, _, s in layout])
    # The first step shows where weights are published; until then this may be the model's memory.
    record = _Record(master.numel(), master.dtype, None, tensor=host, in_model=True)
    bucket.records["master"] = record
    return bucket


def _is_in_place(inputs: UpdaterInputs, master: Tensor) -> bool:
    """Return whether a master is, and will stay, the model's memory.

    Other cases (batch norms of a 16-bit model) are detected when it is published.
    """
    if master.device.type != "cpu":
        return False
    if inputs.config.zero_optimization.stage == 3:
        return inputs.shapes is None  # full parameters are assembled in separate memory
    return inputs.config.dtype == "fp32"
