import os
import shutil
import struct
import subprocess
import sys
from collections import deque
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerolab.reports.spool import AppendFile, Spool, SpoolReader


def read_all(
    directory: Path, max_bytes: int = 64, *, ended: bool = False
) -> list[tuple[int, bytes]]:
    reader = SpoolReader(directory, ended=ended)
    records: list[tuple[int, bytes]] = []
    while True:
        first, payloads = reader.read(max_bytes)
        if not payloads:
            return records
        records += enumerate(payloads, first)


def payload(number: int) -> bytes:
    return f"record {number} ".encode() + bytes(number % 50)


def test_records_are_numbered_over_segments(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=200)
    for number in range(1, 101):
        spool.append(payload(number))
    assert len(list(tmp_path.iterdir())) > 10
    assert read_all(tmp_path) == [(n, payload(n)) for n in range(1, 101)]
    assert read_all(tmp_path, max_bytes=1) == read_all(tmp_path, max_bytes=1 << 20)


def test_concurrent_reader_sees_each_record_once(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path, segment_bytes=100), SpoolReader(tmp_path)
    assert reader.read(1000) == (1, [])
    for number in range(1, 60):
        spool.append(payload(number))
        assert reader.read(1000) == (number, [payload(number)])
        assert reader.read(1000) == (number + 1, [])


def test_reopened_spool_continues_numbers(tmp_path: Path) -> None:
    for number in range(1, 30):
        spool = Spool(tmp_path, segment_bytes=100)
        assert spool.count == number - 1
        spool.append(payload(number))
        spool.close()
    assert read_all(tmp_path) == [(n, payload(n)) for n in range(1, 30)]


def test_reader_seeks_number(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path, segment_bytes=100), SpoolReader(tmp_path)
    for number in range(1, 60):
        spool.append(payload(number))
    for number in (40, 7, 59, 1, 60, 30):
        reader.seek(number)
        first, payloads = reader.read(1)
        assert first == number
        assert payloads == ([payload(number)] if number < 60 else [])


def test_acknowledged_segments_are_deleted(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path, segment_bytes=100), SpoolReader(tmp_path)
    for number in range(1, 60):
        spool.append(payload(number))
    assert reader.read(1 << 20)[0] == 1
    reader.discard(30)
    remaining = read_all(tmp_path)
    assert remaining[0][0] <= 31
    assert remaining == [(n, payload(n)) for n in range(remaining[0][0], 60)]
    reader.discard(59)
    assert len(list(tmp_path.iterdir())) == 1
    spool.append(b"next")
    reader.seek(60)
    assert reader.read(100) == (60, [b"next"])
    assert Spool(tmp_path).count == 60


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 2000), garbage=st.binary(max_size=40))
def test_torn_tail_is_dropped(
    cut: int, garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool, ends = Spool(directory), [0]
    (file,) = directory.iterdir()
    for number in range(1, 31):
        spool.append(payload(number))
        ends.append(file.stat().st_size)
    spool.close()
    cut = min(cut, ends[-1])
    complete = sum(1 for end in ends[1:] if end <= cut)
    os.truncate(file, cut)
    if cut in ends:  # garbage could in theory complete the torn frame
        with file.open("ab") as stream:
            stream.write(bytes(8) + garbage)
    assert read_all(directory) == [(n, payload(n)) for n in range(1, complete + 1)]
    again = Spool(directory)
    assert again.count == complete
    again.append(b"after")
    again.close()
    assert read_all(directory)[-1] == (complete + 1, b"after")


def damage(file: Path, at: int, count: int = 1) -> None:
    """Flip a bit in each of N bytes."""
    content = bytearray(file.read_bytes())
    for bit in range(at, at + count):
        content[bit] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.slow
def test_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    Spool(tmp_path / "whole").close()
    (content,) = (tmp_path / "whole").iterdir()
    spool, ends = Spool(tmp_path / "whole"), []
    for number in range(1, 6):
        spool.append(payload(number))
        ends.append(content.stat().st_size)
    for bit in range(ends[-1]):
        directory = tmp_path / str(bit)
        shutil.copytree(tmp_path / "whole", directory)
        damage(directory / content.name, bit)
        lost = 1 + sum(end <= bit for end in ends)
        expected = [(n, b"" if n == lost else payload(n)) for n in range(1, 6)]
        assert read_all(directory, ended=True) == expected
        again = Spool(directory)  # a continued run appends
        assert again.count == 5
        again.append(b"behind")
        assert read_all(directory) == [*expected, (6, b"behind")]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    at=st.integers(0, 2000), count=st.integers(1, 300), segment_bytes=st.sampled_from([200, 9999])
)
def test_damage_keeps_other_numbers(
    at: int, count: int, segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("spool")
    spool = Spool(directory, segment_bytes=segment_bytes)
    for number in range(1, 61):
        spool.append(payload(number))
    spool.close()
    file = sorted(directory.iterdir())[0]
    size = file.stat().st_size
    damage(file, min(at, size - 1), min(count, size - min(at, size - 1)))
    records = read_all(directory, ended=True)
    assert [number for number, _ in records] == list(range(1, len(records) + 1))
    assert all(data in {b"", payload(number)} for number, data in records)
    assert sum(not data for _, data in records) <= count // 9 + 2
    assert len(records) == 60 or segment_bytes == 9999


def test_torn_segment_costs_its_records_only(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=100)
    for number in range(1, 30):
        spool.append(payload(number))
    damaged = sorted(tmp_path.iterdir())[1]
    following = int(sorted(tmp_path.iterdir())[2].stem)
    os.truncate(damaged, damaged.stat().st_size - 1)
    lost = following - 1
    assert read_all(tmp_path) == [(n, b"" if n == lost else payload(n)) for n in range(1, 30)]


def test_deleted_records_are_read_empty(tmp_path: Path) -> None:
    spool, reader = Spool(tmp_path, segment_bytes=100), SpoolReader(tmp_path)
    for number in range(1, 60):
        spool.append(payload(number))
    reader.discard(40)
    (oldest, *_) = sorted(int(file.stem) for file in tmp_path.iterdir())
    reader.seek(3)
    assert reader.read(1) == (3, [b""] * (oldest - 3))
    assert reader.read(1) == (oldest, [payload(oldest)])


def test_frames_without_numbers_are_read(tmp_path: Path) -> None:
    frames = b"".join(
        struct.pack("<II", len(payload(n)), crc32(payload(n))) + payload(n) for n in range(1, 4)
    )
    (tmp_path / f"{1:020d}.spool").write_bytes(frames)
    spool = Spool(tmp_path)
    assert spool.count == 3
    spool.append(payload(4))
    assert read_all(tmp_path) == [(n, payload(n)) for n in range(1, 5)]


def test_full_spool_stops_growing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, segment_bytes=100, max_bytes=500)
    with pytest.raises(OSError, match="were not uploaded yet"):
        deque(map(spool.append, map(payload, range(1, 1000))))
    count = spool.count
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 700
    SpoolReader(tmp_path).discard(count)
    spool.append(b"room again")
    assert read_all(tmp_path)[-1] == (count + 1, b"room again")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from zerolab.reports.spool import AppendFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
file = AppendFile(Path(sys.argv[1]), 0)
file.append(b"a" * 60)
for size in (60, 41, 50):
    try:
        file.append(b"b" * size)
    except OSError:
        pass
    else:
        sys.exit("was written beyond the limit")
file.append(b"c" * 40)
assert file.size == 100
"""


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the file size simulates a full disk: the write stops in the middle.
    path = tmp_path / "file"
    subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], check=True)
    assert path.read_bytes() == b"a" * 60 + b"c" * 40


def test_files_are_private(tmp_path: Path) -> None:
    Spool(tmp_path / "spool").append(b"x")
    AppendFile(tmp_path / "file", 0).close()
    for path in (tmp_path / "spool", *(tmp_path / "spool").iterdir(), tmp_path / "file"):
        assert path.stat().st_mode & 0o077 == 0


def test_writer_removes_torn_tail(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    first.append(b"whole")
    first.close()
    (segment,) = tmp_path.iterdir()
    content = segment.read_bytes()
    segment.write_bytes(content + content[:-2])
    Spool(tmp_path).close()
    assert segment.read_bytes() == content
