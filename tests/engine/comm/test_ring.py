"""Transport buffers used in turn."""

from collections import deque
from dataclasses import dataclass, field

import torch

from zerotrial.engine.comm.communicator import Ring, SoloCommunicator, Work

CPU = torch.device("cpu")


@dataclass
class Slow:
    """A collective that is over when it is waited for."""

    name: str
    log: list[str] = field(default_factory=list)
    over: bool = False

    def advance(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")
        self.over = True

    def release(self) -> None:
        assert self.over
        self.log.append(f"release {self.name}")

    def is_free(self) -> bool:
        return self.over


def test_buffers_are_reused_in_order() -> None:
    works: deque[Work] = deque()
    ring = Ring(SoloCommunicator(), CPU, 2, works, nbytes=64)
    log: list[str] = []
    homes = []
    for name in "abc":
        ring.wait()
        homes.append(ring.get(8, torch.float32).tensor.data_ptr())
        work = Slow(name, log)
        works.append(work)
        ring.advance_turn(work)
    assert homes[0] == homes[2] != homes[1]
    assert log == ["wait a", "release a"]
    assert [work.name for work in works] == ["b", "c"]  # type: ignore[attr-defined]


def test_buffer_ahead_is_free_without_reader() -> None:
    works: deque[Work] = deque()
    ring = Ring(SoloCommunicator(), CPU, 2, works, nbytes=64)
    work = Slow("a")
    ring.advance_turn(work)
    assert ring.is_free(0)
    assert not ring.is_free(1)
    assert not ring.is_free(2)
    work.wait()
    assert ring.is_free(1)


def test_buffers_are_allocated_on_demand_and_grow() -> None:
    ring = Ring(SoloCommunicator(), CPU, 3, deque())
    assert ring.tensors == []
    assert ring.get(4, torch.float64).tensor.shape == (4,)
    assert ring.get(2, torch.bfloat16).tensor.dtype == torch.bfloat16
    assert [tensor.numel() for tensor in ring.tensors] == [32]
    ring.get(9, torch.float64)
    assert [tensor.numel() for tensor in ring.tensors] == [72]
