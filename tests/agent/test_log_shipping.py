"""Log shipping: every line arrives exactly once, also after crashes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolab.agent.logs import LogShipper
from zerolab.contract.messages import LogEntry
from zerolab.contract.run_folder import RunFolder
from zerolab.errors import UnreachableError


class Store:
    """Stores entries by number like the server; responses can get lost."""

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.down = False
        self.lose_answer = False

    def ship_logs(self, run_id: int, first: int, entries: list[LogEntry], node: int = 0) -> int:
        assert (run_id, node) == (7, 0)
        if self.down:
            raise UnreachableError("down")
        assert first <= len(self.entries), "a gap"
        self.entries += entries[len(self.entries) - first :]
        if self.lose_answer:
            raise UnreachableError("the connection broke after the server had stored it")
        return len(self.entries)

    def texts(self, rank: int | None, stream: str) -> list[str]:
        return [
            entry.text for entry in self.entries if (entry.rank, entry.stream) == (rank, stream)
        ]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write(path: Path, text: str) -> None:
    with path.open("a", newline="") as file:
        file.write(text)


def test_lines_carry_rank_stream_and_level(folder: RunFolder) -> None:
    store = Store()
    write(folder.stdout(0), "epoch 1\n\nepoch 2\n")
    write(folder.stderr(1), "2026-01-01 12:00:00 WARNING root: careful with ERROR\n")
    write(folder.agent_log, "rank 1 was killed\n")
    write(folder.launcher_log, "not for users\n")
    LogShipper(folder, 7, store).ship()
    shipped = {(entry.rank, entry.stream, entry.level, entry.text) for entry in store.entries}
    assert shipped == {
        (0, "stdout", None, "epoch 1"),
        (0, "stdout", None, ""),
        (0, "stdout", None, "epoch 2"),
        (1, "stderr", "WARNING", "2026-01-01 12:00:00 WARNING root: careful with ERROR"),
        (None, "agent", None, "rank 1 was killed"),
    }


def test_incomplete_line_waits_for_end_of_run(folder: RunFolder) -> None:
    store = Store()
    shipper = LogShipper(folder, 7, store)
    write(folder.stdout(0), "first\nsec")
    shipper.ship()
    assert store.texts(0, "stdout") == ["first"]
    write(folder.stdout(0), "ond\nthird")
    shipper.ship(final=True)
    assert store.texts(0, "stdout") == ["first", "second", "third"]


def test_terminal_codes_are_removed(folder: RunFolder) -> None:
    store = Store()
    write(folder.stdout(0), "\x1b[1;31mloss\x1b[0m 0.5\x1b[K\n\x1b]0;title\x07[1] a plain line\n")
    LogShipper(folder, 7, store).ship()
    assert store.texts(0, "stdout") == ["loss 0.5", "[1] a plain line"]


def test_progress_bar_has_last_state(folder: RunFolder) -> None:
    store = Store()
    write(folder.stderr(0), "10 %\r50 %\r100 %\nwindows line\r\n")
    LogShipper(folder, 7, store).ship()
    assert store.texts(0, "stderr") == ["100 %", "windows line"]


def test_invalid_utf8_is_shipped(folder: RunFolder) -> None:
    store = Store()
    folder.stdout(0).write_bytes(b"\xff\xfe\x00\nfine\n")
    LogShipper(folder, 7, store).ship()
    assert store.texts(0, "stdout")[1] == "fine"


def test_large_output_is_split_into_batches(folder: RunFolder) -> None:
    store = Store()
    lines = [f"line {number} {'x' * 90}" for number in range(10_000)]
    write(folder.stdout(0), "\n".join(lines) + "\n")
    write(folder.stdout(1), "y" * 600_000)
    LogShipper(folder, 7, store).ship(final=True)
    assert store.texts(0, "stdout") == lines
    assert len(store.texts(1, "stdout")) == 3, "a line without an end is cut"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "ship", "down", "lose", "restart"]), st.integers(0, 2)),
        max_size=30,
    )
)
def test_lines_arrive_once_after_crashes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "7")
    folder.create()
    store = Store()
    shipper = LogShipper(folder, 7, store)
    written: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for action, rank in steps:
        store.down, store.lose_answer = action == "down", action == "lose"
        if action == "write":
            written[rank].append(f"rank {rank} line {len(written[rank])}")
            write(folder.stdout(rank), f"{written[rank][-1]}\n")
        elif action == "restart":
            shipper = LogShipper(folder, 7, store)
        else:
            try:
                shipper.ship()
            except UnreachableError:
                # Data in memory is lost with the agent: the next one starts from the disk.
                shipper = LogShipper(folder, 7, store) if rank == 0 else shipper
    store.down = store.lose_answer = False
    LogShipper(folder, 7, store).ship(final=True)
    for rank, lines in written.items():
        assert store.texts(rank, "stdout") == lines
