"""Download of a checkpoint from a server, verified and resumable."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import msgspec

from zerolab.client.objects.interface import ClientMethods
from zerolab.contract.names import resources_problem
from zerolab.errors import ConfigError, ConflictError, NotFoundError
from zerolab.files import write_atomic
from zerolab.storage.backends import DESCRIPTION_FILE, StoredCheckpoint, path_inside
from zerolab.storage.objects import FileRecord, file_hash

__all__ = ["download_checkpoint"]


def download_checkpoint(
    client: ClientMethods, uuid: str, directory: str | Path, globs: Sequence[str] = ()
) -> int:
    """Download a checkpoint's files; complete files are not downloaded again.

    Args:
        client: ClientMethods of the checkpoint's server.
        uuid: Uuid of the checkpoint, or its first characters.
        directory: New, empty, or with an earlier copy of the same checkpoint.
        globs: Patterns of the files to download; empty for all.

    Returns:
        Bytes of the requested files.

    Raises:
        ConfigError: If no file matches the patterns.
        ConflictError: If the directory has other content, or the checkpoint was deleted.
        NotFoundError: If a file differs from the saved one.
    """
    directory = Path(directory)
    uuid = client.checkpoint(uuid)["uuid"]  # complete abbreviated uuids
    content = b"".join(client.checkpoint_file(uuid, DESCRIPTION_FILE))
    _check_directory(directory, uuid)
    described = msgspec.json.decode(content, type=StoredCheckpoint)
    if problem := resources_problem(described.resources):
        raise NotFoundError(f"checkpoint {uuid} is damaged: {problem}; take an earlier checkpoint")
    selected = [
        name
        for name in described.resources
        if not globs or any(fnmatch.fnmatchcase(name, pattern) for pattern in globs)
    ]
    if globs and not selected:
        names = ", ".join(sorted(described.resources)[:10])
        problem = f"must fit at least one file, got {', '.join(globs)}; there are: {names}"
        raise ConfigError("checkpoint download", [f"--glob: {problem}"])
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / DESCRIPTION_FILE, content, mode=0o644)
    for name in selected:
        record = FileRecord(described.resources[name], described.hashes.get(name, ""))
        target = path_inside(directory.resolve().parent, directory.resolve().name, name)
        _copy(client, (uuid, name), target, record)
    return sum(described.resources[name] for name in selected)


def _check_directory(directory: Path, uuid: str) -> None:
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    description = directory / DESCRIPTION_FILE
    if description.is_file() and uuid.encode() in description.read_bytes():
        return
    raise ConflictError(
        f"{directory}: must be new or empty, or hold an earlier copy of checkpoint {uuid}"
    )


def _copy(client: ClientMethods, source: tuple[str, str], target: Path, record: FileRecord) -> None:
    uuid, name = source
    target.parent.mkdir(parents=True, exist_ok=True)
    if _fits(target, record):
        return
    part = target.with_name(f"{target.name}.part")
    for _ in range(2):  # an earlier copy may have other content
        with part.open("ab") as file:
            if file.tell() > record.size:
                file.truncate(0)
            for piece in client.checkpoint_file(uuid, name, file.tell()) if record.size else ():
                file.write(piece)
        if _fits(part, record):
            part.replace(target)
            return
        part.unlink()
    msg = f"checkpoint {uuid}: {name} is damaged: its content differs from the saved file"
    raise NotFoundError(f"{msg}; take an earlier checkpoint")


def _fits(path: Path, record: FileRecord) -> bool:
    if not path.is_file() or path.stat().st_size != record.size:
        return False
    return not record.hash or file_hash(path) == record.hash
