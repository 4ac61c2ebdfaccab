import gzip
import io
import os
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from zerolab.client import archive
from zerolab.errors import ConfigError


def write(directory: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def names(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def packed_names(directory: Path, tmp_path: Path) -> set[str]:
    target = tmp_path / "unpacked"
    archive.unpack(archive.pack(directory), target)
    return names(target)


def test_pack_unpack_round_trip(tmp_path: Path) -> None:
    files = {
        "model_def.py": "x = 1\n",
        "data/words ä.txt": "ö",
        "empty": b"",
        "run.sh": "#!/bin/sh",
    }
    model = write(tmp_path / "model", files)
    (model / "run.sh").chmod(0o755)
    target = tmp_path / "copy"
    archive.unpack(archive.pack(model), target)
    assert names(target) == set(files)
    assert (target / "data/words ä.txt").read_text(encoding="utf-8") == "ö"
    assert os.access(target / "run.sh", os.X_OK)
    assert not os.access(target / "model_def.py", os.X_OK)


def test_pack_is_reproducible(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"b.py": "b", "a.py": "a", "sub/c.py": "c"})
    second = write(tmp_path / "second", {"sub/c.py": "c", "a.py": "a", "b.py": "b"})
    os.utime(second / "a.py", (1, 1))
    (second / "b.py").chmod(0o600)
    assert archive.pack(first) == archive.pack(second)


def test_ignored_files_are_excluded(tmp_path: Path) -> None:
    model = write(
        tmp_path / "model",
        {
            "model_def.py": "",
            ".gitignore": "*.bin\nout/\n/only_here.txt\n",
            ".zerolabignore": "secret.txt\n!keep.bin\n",
            "big.bin": "",
            "keep.bin": "",
            "secret.txt": "",
            "only_here.txt": "",
            "sub/only_here.txt": "",
            "sub/.gitignore": "!wanted.bin\nlocal.txt\n",
            "sub/wanted.bin": "",
            "sub/local.txt": "",
            "sub/other.bin": "",
            "out/model_def.py": "",
            ".git/config": "",
            "__pycache__/model_def.cpython-311.pyc": "",
            ".venv/lib.py": "",
            "agent.token": "",
        },
    )
    assert packed_names(model, tmp_path) == {
        "model_def.py",
        ".gitignore",
        ".zerolabignore",
        "keep.bin",
        "sub/only_here.txt",
        "sub/.gitignore",
        "sub/wanted.bin",
    }


def test_file_links_are_resolved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path / "model", {"model_def.py": ""})
    write(tmp_path, {"shared.py": "shared"})
    (model / "shared.py").symlink_to(tmp_path / "shared.py")
    (model / "everything").symlink_to(tmp_path)
    (model / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(model / "pipe")
    assert packed_names(model, tmp_path) == {"model_def.py", "shared.py"}
    for name in ("everything", "nowhere", "pipe"):
        assert f"{name} is skipped" in caplog.text


def test_too_large_directory_names_largest_files(tmp_path: Path) -> None:
    sizes = {f"file_{i}": i * 1024 for i in range(1, 9)}
    model = write(tmp_path / "model", {name: bytes(size) for name, size in sizes.items()})
    with pytest.raises(ConfigError) as caught:
        archive.pack(model, max_bytes=10 * 1024)
    message = str(caught.value)
    assert ".zerolabignore" in message
    assert message.index("file_8") < message.index("file_7") < message.index("file_4")
    assert "file_3" not in message
    assert archive.ARCHIVE_BYTES == 96 * 1024 * 1024


@pytest.mark.parametrize("present", [True, False])
def test_empty_directory_is_rejected(present: bool, tmp_path: Path) -> None:
    if present:
        write(tmp_path / "model", {".git/config": ""})
    with pytest.raises(ConfigError, match="model directory"):
        archive.pack(tmp_path / "model")


def tar(*members: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as file:
        for info in members:
            file.addfile(info, io.BytesIO(bytes(info.size)))
    return stream.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 1
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = size if kind == tarfile.REGTYPE else 0
    return info


HOSTILE: dict[str, Callable[[], bytes]] = {
    "parent": lambda: tar(member("../evil")),
    "parent inside": lambda: tar(member("a/../../evil")),
    "absolute": lambda: tar(member("/tmp/evil")),
    "backslash": lambda: tar(member("..\\evil")),
    "symlink": lambda: tar(member("link", tarfile.SYMTYPE, "/etc"), member("link/evil")),
    "hard link": lambda: tar(member("link", tarfile.LNKTYPE, "/etc/passwd")),
    "device": lambda: tar(member("null", tarfile.CHRTYPE)),
    "pipe": lambda: tar(member("pipe", tarfile.FIFOTYPE)),
    "twice": lambda: tar(member("same"), member("same")),
    "file as directory": lambda: tar(member("same"), member("same/inside")),
    "too large": lambda: tar(member("large", size=3_000_000)),
    "too many": lambda: tar(*(member(f"f{i}", size=0) for i in range(archive.MAX_FILES + 1))),
    "cut": lambda: tar(member("whole", size=100_000))[:-40],
    "no archive": lambda: b"PK\x03\x04 something else",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_invalid_archive_is_rejected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 1000)
    target = tmp_path / "inside" / "target"
    with pytest.raises(ConfigError, match="archive"):
        archive.unpack(HOSTILE[kind](), target, max_bytes=2_000_000)
    assert {p.name for p in tmp_path.iterdir()} == {"inside"}
    assert {p.name for p in (tmp_path / "inside").iterdir()} == {"target"}
    assert not any(p.is_symlink() for p in target.rglob("*"))


def damaged_checksum(packed: bytes) -> bytes:
    return packed[:-8] + bytes(4) + packed[-4:]


def damaged_length(packed: bytes) -> bytes:
    return packed[:-1] + bytes([packed[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        damaged_checksum,
        damaged_length,
        lambda packed: packed + b"garbage",
        lambda packed: packed[:-4],
    ],
)
def test_archive_is_read_to_end(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    packed = archive.pack(write(tmp_path / "model", {"model_def.py": "x = 1\n"}))
    assert archive.read_member(packed, "nothing") is None
    with pytest.raises(ConfigError, match=r"must be an undamaged tar\.gz"):
        archive.read_member(damage(packed), "nothing")


def archive_with_headers(count: int, size: int) -> bytes:
    """Return an archive of one file with ``count`` extended headers of ``size`` bytes."""
    record = b" comment=" + b"x" * size + b"\n"
    record = str(len(record) + len(str(len(record) + 9))).encode() + record
    head = tarfile.TarInfo("pax")
    head.type, head.size = tarfile.XHDTYPE, len(record)
    block = head.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512)
    file = tarfile.TarInfo("model_def.py").tobuf(tarfile.USTAR_FORMAT)
    return gzip.compress(block * count + file + bytes(1024), 1)


def test_too_large_header_is_rejected() -> None:
    archive.read_member(archive_with_headers(1, 4000), "nothing")
    bomb = archive_with_headers(1, 40_000_000)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="is larger than it can be"):
        archive.read_member(bomb, "nothing")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4_000_000
    with pytest.raises(ConfigError, match="must be an undamaged"):
        archive.read_member(archive_with_headers(5000, 10), "nothing")
    with pytest.raises(ConfigError, match="is larger than it can be"):
        archive.read_member(archive_with_headers(300, 4000), "nothing")


def test_decompression_bomb_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 1000)
    padded = gzip.compress(gzip.decompress(tar(member("small"))) + bytes(10_000_000))
    assert len(padded) < 100_000
    with pytest.raises(ConfigError, match="more than a model directory may hold"):
        archive.read_member(padded, "nothing", max_bytes=1_000_000)


def test_unpack_requires_empty_directory(tmp_path: Path) -> None:
    write(tmp_path, {"model_def.py": "mine"})
    with pytest.raises(ConfigError, match="must be empty"):
        archive.unpack(tar(member("model_def.py")), tmp_path)
    assert (tmp_path / "model_def.py").read_text() == "mine"


def test_read_member_without_unpacking(tmp_path: Path) -> None:
    model = write(tmp_path / "model", {"conf/ds.json": "{}", "a.py": ""})
    packed = archive.pack(model)
    assert archive.read_member(packed, "conf/ds.json") == b"{}"
    assert archive.read_member(packed, "./conf/ds.json") == b"{}"
    assert archive.read_member(packed, "conf/other.json") is None
    assert archive.read_member(packed, "conf") is None
