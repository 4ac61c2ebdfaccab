"""Reproducible tar.gz archives of model directories, with strict checks when unpacking.

``.zerolabignore`` and ``.gitignore`` in any directory exclude files; the deepest directory
decides, and ``.zerolabignore`` overrides ``.gitignore``. Version control and caches are always
excluded. Links to files are packed as the files that they point to; links to directories are
excluded.
"""

import gzip
import io
import logging
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

import pathspec

from zerolab.contract.limits import ARCHIVE_BYTES
from zerolab.contract.names import file_name_problem
from zerolab.errors import ConfigError
from zerolab.formatting import size_text
from zerolab.schema.json_values import is_text

__all__ = ["member_sizes", "pack", "package_files", "read_member", "unpack"]

logger = logging.getLogger(__name__)

MAX_FILES = 20_000

_IGNORE_FILES = (".gitignore", ".zerolabignore")  # later lines win
_ALWAYS_IGNORED = (
    ".git/", ".hg/", ".svn/", ".venv/", "node_modules/", ".zerolab/",
    "__pycache__/", "*.py[co]", ".ipynb_checkpoints/", ".mypy_cache/", ".ruff_cache/",
    ".pytest_cache/", ".DS_Store", "agent.token",
)  # fmt: skip
_HEADER_BYTES = 4096  # upper estimate of a tar member's header
_DESCRIPTION_EFFORT = 50_000**2  # bytes squared; 20,000 files with 353 bytes each
_DESCRIPTIONS = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE}
    | {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
_PIECE = 1 << 20
_DAMAGE_ERRORS = (
    tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeError,
    RecursionError,  # a description of a description of a ...
)  # fmt: skip


class _Member(NamedTuple):
    name: str
    path: Path
    size: int
    executable: bool


class _IgnoreRules(NamedTuple):
    base: PurePosixPath
    spec: pathspec.GitIgnoreSpec


def pack(model_dir: str | Path, *, max_bytes: int = ARCHIVE_BYTES) -> bytes:
    """Pack a model directory into an archive.

    The same files always give the same bytes. ``.zerolabignore`` and ``.gitignore`` exclude files.

    Args:
        model_dir: The directory with the user's code.
        max_bytes: Maximum total size of the files.

    Returns:
        The archive as tar.gz, for :meth:`Client.create_experiment`.

    Raises:
        ConfigError: If the directory is missing, has no files to pack, or too many.

    Example:
        >>> from pathlib import Path
        >>> from zerolab.client.archive import pack, unpack
        >>> Path("model").mkdir(exist_ok=True)
        >>> size = Path("model/train.py").write_text("print('training')")
        >>> unpack(pack("model"), "copy")
        >>> Path("copy/train.py").read_text()
        "print('training')"
    """
    if not isinstance(model_dir, str | os.PathLike):
        problem = f"model_dir: must be a path, got {model_dir!r}"
        raise ConfigError("model directory", [problem])
    model_dir = Path(model_dir)
    if not model_dir.is_dir():
        raise ConfigError("model directory", [f"{model_dir}: must be a directory that exists"])
    members = sorted(_members(model_dir, PurePosixPath(), []))
    _check_size(model_dir, members, max_bytes)
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=4, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member in members:
            content = member.path.read_bytes()
            info = tarfile.TarInfo(member.name)
            info.size = len(content)
            info.mode = 0o755 if member.executable else 0o644
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def package_files(package: Path) -> list[Path]:
    """Return the Python files of a package that ``pack`` of the directory above it would include.

    Args:
        package: Directory of the package. Its ignore files and those of the directory above it
            apply.

    Raises:
        ConfigError: If a file has an invalid name.
    """
    above = list(_ignores_of(package.parent, PurePosixPath()))
    members = _members(package, PurePosixPath(package.name), above)
    return sorted(member.path for member in members if member.path.suffix == ".py")


def unpack(archive: bytes, directory: str | Path, *, max_bytes: int = ARCHIVE_BYTES) -> None:
    """Unpack an archive of :func:`pack` into an empty or missing directory.

    Nothing is written outside ``directory``, and only plain files and directories are created.

    Args:
        archive: The archive as tar.gz.
        directory: Target directory.
        max_bytes: Maximum total size of the files.

    Raises:
        ConfigError: If the archive is damaged, too large, or has a member with an invalid name or
            type; or if ``directory`` is not empty.

    Example:
        >>> from pathlib import Path
        >>> from zerolab.client.archive import pack, unpack
        >>> Path("notes").mkdir()
        >>> size = Path("notes/readme.txt").write_text("text")
        >>> unpack(pack("notes"), "unpacked")
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigError("archive", [f"{directory}: must be empty before an archive goes there"])
    for _ in _read(archive, max_bytes):
        pass  # check everything before writing
    for info, content in _read(archive, max_bytes):
        target = directory / info.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                target.mkdir(exist_ok=True)
                continue
            with target.open("xb") as file:
                file.write(content)
            target.chmod(0o755 if info.mode & stat.S_IXUSR else 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise ConfigError("archive", [f"{info.name}: occurs in it twice"]) from error


def read_member(archive: bytes, path: str, *, max_bytes: int = ARCHIVE_BYTES) -> bytes | None:
    """Return a file of an archive, or None if it is missing.

    Raises:
        ConfigError: As :func:`unpack`.
    """
    member_path = PurePosixPath(path)
    for info, content in _read(archive, max_bytes):
        if content is not None and PurePosixPath(info.name) == member_path:
            return content
    return None


def member_sizes(archive: bytes, *, max_bytes: int = ARCHIVE_BYTES) -> dict[str, int]:
    """Return the bytes of each file of an archive, by its name.

    Raises:
        ConfigError: As :func:`unpack`.
    """
    members = _read(archive, max_bytes)
    return {
        str(PurePosixPath(info.name)): len(content)
        for info, content in members
        if content is not None
    }


def _members(
    directory: Path, prefix: PurePosixPath, above: Sequence[_IgnoreRules]
) -> Iterator[_Member]:
    ignores = [*above, *_ignores_of(directory, prefix)]
    with os.scandir(directory) as iterator:
        entries = list(iterator)
    for entry in entries:
        name = prefix / entry.name
        is_dir = entry.is_dir(follow_symlinks=False)
        if not is_text(entry.name):  # no pattern of an ignore file could match it
            problem = f"{entry.path!r}: the name must be text in UTF-8; rename it"
            raise ConfigError("model directory", [f"{problem}, or ignore the folder above it"])
        if _is_ignored(f"{name}/" if is_dir else str(name), ignores):
            continue
        if is_dir:
            yield from _members(Path(entry.path), name, ignores)
        elif entry.is_file():
            status = entry.stat()
            executable = bool(status.st_mode & stat.S_IXUSR)
            yield _Member(str(name), Path(entry.path), status.st_size, executable)
        else:
            logger.warning("%s is skipped: neither a file nor a link to a file", entry.path)


def _ignores_of(directory: Path, prefix: PurePosixPath) -> Iterator[_IgnoreRules]:
    lines = [] if prefix.parts else list(_ALWAYS_IGNORED)
    for name in _IGNORE_FILES:
        file = directory / name
        if file.is_file():
            lines += file.read_text(encoding="utf-8", errors="replace").splitlines()
    if lines:
        yield _IgnoreRules(prefix, pathspec.GitIgnoreSpec.from_lines(lines))


def _is_ignored(name: str, ignores: Sequence[_IgnoreRules]) -> bool:
    """Return whether a file is excluded; the deepest directory with a matching pattern decides."""
    for ignore in reversed(ignores):
        inside = name.removeprefix(f"{ignore.base}/") if ignore.base.parts else name
        is_excluded = ignore.spec.check_file(inside).include
        if is_excluded is not None:
            return is_excluded
    return False


def _check_size(model_dir: Path, members: Sequence[_Member], max_bytes: int) -> None:
    problems = []
    if not members:
        problems.append(f"{model_dir}: must hold at least one file that is not ignored")
    problems += [
        f"{model_dir}: the name of a file {name_problem}; rename the file, or name it in "
        ".zerolabignore"
        for member in members
        if (name_problem := file_name_problem(member.name))
    ][:10]
    if len(members) > MAX_FILES:
        problems.append(
            f"{model_dir}: must hold at most {MAX_FILES} files, holds {len(members)}; list files "
            "that the trial does not need in .zerolabignore"
        )
    total = sum(member.size for member in members)
    if total > max_bytes:
        largest = sorted(members, key=lambda member: -member.size)[:5]
        listed = ", ".join(f"{member.name} ({size_text(member.size)})" for member in largest)
        problems.append(
            f"{model_dir}: must hold at most {size_text(max_bytes)}, holds {size_text(total)}; "
            f"list unneeded files in .zerolabignore; the largest: {listed}"
        )
    if problems:
        raise ConfigError("model directory", problems)


class _BoundedGzip(gzip.GzipFile):
    """Gzip reader that raises when the output exceeds a limit."""

    def __init__(self, archive: bytes, limit: int) -> None:
        super().__init__(fileobj=io.BytesIO(archive), mode="rb")
        self._budget = limit

    def read(self, size: int | None = -1) -> bytes:
        """Read up to the limit."""
        unlimited = size is None or size < 0
        data = super().read(self._budget + 1 if unlimited else min(size or 0, self._budget + 1))
        self._budget -= len(data)
        if self._budget < 0:
            raise ConfigError("archive", ["unpacks to more than a model directory may hold"])
        return data


class _BoundedInfo(tarfile.TarInfo):
    """Member whose extended header is bounded in size.

    Python's time for reading such a header grows with the square of its size.
    """

    remaining_effort = 0

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a header; extended headers precede the header that they describe."""
        info = super().frombuf(buf, encoding, errors)
        if info.type in _DESCRIPTIONS:
            cls.remaining_effort -= info.size**2
            if cls.remaining_effort < 0:
                problem = "what describes its files (names, attributes) is larger than it can be"
                raise ConfigError("archive", [problem])
        return info


def _read(archive: bytes, max_bytes: int) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yield the members of an archive once; the content of a directory is None."""
    # Bounds for hostile archives: bytes after decompression, headers, and members.
    limit = max_bytes + _HEADER_BYTES * MAX_FILES

    class Info(_BoundedInfo):
        remaining_effort = _DESCRIPTION_EFFORT

    count = total = 0
    try:
        with (
            _BoundedGzip(archive, limit) as unzipped,
            # As a stream: the total size is checked before the next member is unpacked.
            tarfile.open(fileobj=unzipped, mode="r|", tarinfo=Info) as tar,
        ):
            for info in tar:
                count += 1
                total += info.size
                _check_member(info, count, total, max_bytes)
                file = tar.extractfile(info)
                yield info, file.read() if file else None
            while unzipped.read(_PIECE):  # up to the checksum and anything after it
                pass
    except _DAMAGE_ERRORS as error:
        raise ConfigError("archive", [f"must be an undamaged tar.gz: {error}"]) from error


def _check_member(info: tarfile.TarInfo, count: int, total: int, max_bytes: int) -> None:
    name = info.name
    parts = PurePosixPath(name).parts
    problem = None
    if not parts and info.isdir():
        return  # "." itself, as `tar czf x.tar.gz .` writes it
    if name.startswith("/") or (name_problem := file_name_problem(str(PurePosixPath(name)))):
        problem = "must be a path inside the directory" if name.startswith("/") else name_problem
    elif not (info.isreg() or info.isdir()):
        problem = "must be a plain file or a directory, not a link or a device"
    elif info.size < 0 or total > max_bytes:
        problem = f"the files must add up to at most {size_text(max_bytes)}"
    elif count > MAX_FILES:
        problem = f"there must be at most {MAX_FILES} files"
    if problem:
        raise ConfigError("archive", [f"{name[:200]!r}: {problem}"])
