"""The collectives: every implementation gives the same results, and a dead peer is named."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.engine.tensor_sizes import storage_bytes
from tests.waiting import DEADLINE_S, until
from zerotrial.engine.comm.communicator import (
    Communicator,
    GroupCommunicator,
    PeerError,
    SoloCommunicator,
)
from zerotrial.engine.comm.factory import connect
from zerotrial.extensions.shared_memory.collectives import SharedMemoryCommunicator

CPU = torch.device("cpu")
SHARD = 100_000
"""More than one chunk of a sum."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def value(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def names_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def check_reductions(comm: Communicator) -> None:
    numel = SHARD * comm.size
    local = slice(comm.rank * SHARD, (comm.rank + 1) * SHARD)
    for dtype in DTYPES:
        everyone = [value(rank, dtype, numel).double() for rank in range(comm.size)]
        total = torch.stack(everyone).sum(0)
        tolerance = 5e-2 if dtype.itemsize == 2 else 1e-5  # gloo sums 16 bits in 16 bits
        precision = {"rtol": tolerance, "atol": tolerance}
        buffer = comm.allocate(numel, dtype, CPU)
        buffer.tensor.copy_(value(comm.rank, dtype, numel))
        out = torch.ones(SHARD)
        works = [comm.reduce_scatter(buffer, out, 0.5, add=True)]
        works.append(comm.reduce_scatter(buffer, buffer.tensor[local], 1.0, add=False))
        for work in works:
            work.wait()
        expected = total[local]
        torch.testing.assert_close(out.double(), 1 + 0.5 * expected, check_dtype=False, **precision)
        torch.testing.assert_close(
            buffer.tensor[local].double(), expected, check_dtype=False, **precision
        )
        for work in works:
            work.release()
        comm.fence()
        buffer.tensor.copy_(value(comm.rank, dtype, numel))
        comm.all_reduce(buffer, 2.0).wait()
        torch.testing.assert_close(buffer.tensor.double(), 2 * total, **precision)
        comm.fence()


def check_copies(comm: Communicator) -> None:
    numel = 1000 * comm.size
    buffer = comm.allocate(numel, torch.float32, CPU)
    buffer.tensor[comm.rank * 1000 : (comm.rank + 1) * 1000] = comm.rank + 1.0
    half = buffer.part(0, numel)
    work = comm.all_gather(half)
    while not work.advance():
        if not isinstance(comm, SharedMemoryCommunicator):
            work.wait()
    expected = torch.arange(1.0, comm.size + 1).repeat_interleave(1000)
    assert torch.equal(buffer.tensor, expected)
    for _ in range(5):
        squares = comm.sum(torch.tensor([comm.rank + 1.0, 0.5], dtype=torch.float64))
        assert squares.tolist() == [comm.size * (comm.size + 1) / 2, 0.5 * comm.size]
    for shape in ((), (3, 4)):
        tensor = torch.full(shape, float(comm.rank))
        comm.broadcast(tensor)
        assert not tensor.any()


def check_common_memory(comm: Communicator) -> None:
    if not isinstance(comm, SharedMemoryCommunicator):
        assert not hasattr(comm, "allocate_shared")
        return
    common = comm.allocate_shared(6 * comm.size, torch.bfloat16)
    shared = common.part(0, 6 * comm.size)
    assert not shared.any()
    comm.fence()
    local = common.part(6 * comm.rank, 6 * comm.rank + 6)
    local.fill_(comm.rank + 1.0)
    comm.fence()
    assert shared.view(comm.size, 6)[:, 0].tolist() == [r + 1.0 for r in range(comm.size)]
    assert storage_bytes([local]) == 12  # other ranks' memory is not counted


def check_every_communicator() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    comms: list[Communicator] = [connect(group, CPU), GroupCommunicator(group, CPU)]
    for comm in comms:
        check_reductions(comm)
        check_copies(comm)
        check_common_memory(comm)
        comm.traffic.clear()
        buffer = comm.allocate(100 * comm.size, torch.float32, CPU)
        out = torch.empty(100)
        comm.reduce_scatter(buffer, out, 1.0, add=False).wait()
        comm.all_gather(buffer).wait()
        comm.all_reduce(buffer, 1.0).wait()
        comm.fence()
        assert comm.traffic.total == 4 * 100 * comm.size
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert all("memfd" in line for line in lines if "zerolab" in line)
    return [type(comm).__name__ for comm in comms]


def join_late(directory: Path) -> str:
    """Rank 2 is missing from a collective with a timeout of one second."""
    group = dist.group.WORLD
    assert group is not None
    comm = connect(group, CPU)
    assert isinstance(comm, SharedMemoryCommunicator)
    assert comm._sockets._timeout_s == DEADLINE_S  # the group's
    comm._sockets._timeout_s = 1.0
    if comm.rank == 2:
        until(
            "the others have given up",
            lambda: list(directory.glob("given up *")),
            lambda names: len(names) == comm.size - 1,
        )
        return ""
    try:
        comm.fence()
    except PeerError as error:
        (directory / f"given up {comm.rank}").touch()
        return str(error)
    return "no error"


def disagree() -> str:
    """Rank 0 calls another collective than the others."""
    group = dist.group.WORLD
    assert group is not None
    comm = connect(group, CPU)
    buffer = comm.allocate(60, torch.float32, CPU)
    try:
        if comm.rank == 0:
            comm.all_gather(buffer).wait()
        else:
            comm.reduce_scatter(buffer, torch.empty(20), 1.0, add=False).wait()
            comm.fence()
    except PeerError as error:
        comm.close()
        return str(error)
    return "no error"


def die(directory: Path) -> str:
    """Rank 1 is killed while the others wait for it; their errors."""
    group = dist.group.WORLD
    assert group is not None
    comm = connect(group, CPU)
    buffer = comm.allocate(400 * comm.size, torch.float32, CPU)
    comm.fence()
    comm._sockets._timeout_s = 10 * DEADLINE_S  # waiting for it fails
    if comm.rank == 1:
        until(
            "the others wait",
            lambda: list(directory.glob("waiting *")),
            lambda names: len(names) == comm.size - 1,
        )
        os.kill(os.getpid(), signal.SIGKILL)
    work = comm.reduce_scatter(buffer, torch.empty(400), 1.0, add=False)
    (directory / f"waiting {comm.rank}").touch()
    try:
        work.wait()
    except PeerError as error:
        return str(error)
    return "no error"


def run_all(directory: str) -> dict[str, Any]:
    results: dict[str, Any] = {"names": check_every_communicator()}
    results["late"] = join_late(Path(directory))
    results["disagreement"] = disagree()
    results["death"] = die(Path(directory))
    # The world is broken now: skip the barrier that ends a healthy one.
    dist.barrier = lambda *_, **__: None  # type: ignore[assignment]
    dist.destroy_process_group = lambda *_, **__: None  # type: ignore[assignment]
    return results


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], set[str]]:
    """Results of three ranks, and new files in /dev/shm after the second was killed."""
    before = names_in_shared_memory()
    directory = tmp_path_factory.mktemp("ranks")
    results = run_on_ranks(run_all, 3, str(directory), expect_deaths=True)
    return results, {name for name in names_in_shared_memory() - before if "zerolab" in name}


Outcome = tuple[list[Any], set[str]]


@pytest.mark.processes
def test_all_communicators_agree(outcome: Outcome) -> None:
    (first, dead, third), _ = outcome
    assert dead is None
    names = ["SharedMemoryCommunicator", "GroupCommunicator"]
    assert first["names"] == third["names"] == names


@pytest.mark.processes
def test_killed_rank_is_named_without_timeout(outcome: Outcome) -> None:
    (first, _, third), _ = outcome
    for rank in (first, third):
        assert rank["death"].startswith("rank 1 has exited or closed its engine; see its log lines")
        assert "reduce_scatter of 1200 elements" in rank["death"]


@pytest.mark.processes
def test_killed_rank_leaves_no_shared_memory(outcome: Outcome) -> None:
    assert outcome[1] == set()


@pytest.mark.processes
def test_mismatched_collectives_are_reported(outcome: Outcome) -> None:
    (first, _, third), _ = outcome
    assert "all_gather of 60 elements: rank" in first["disagreement"]
    assert "called reduce_scatter of 60 elements instead" in first["disagreement"]
    assert third["disagreement"] != "no error"


@pytest.mark.processes
def test_late_rank_is_named_after_timeout(outcome: Outcome) -> None:
    (first, _, _), _ = outcome
    assert "2 has not called it within 1 s" in first["late"]


def test_single_rank_needs_no_peers() -> None:
    comm = connect(None, CPU)
    assert isinstance(comm, SoloCommunicator)
    check_reductions(comm)
    check_copies(comm)
