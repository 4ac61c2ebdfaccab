"""Artifacts of wandb: named groups of files, reported as files of the trial."""

import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from zerolab.extensions.wandb_api.run_values import plain
from zerolab.reports.media_reports import MediaReports

__all__ = ["Artifact"]


class Artifact:
    """Group of files, as ``wandb.Artifact``; ``run.log_artifact`` reports each file.

    Args:
        name: Name of the artifact; its files are named ``NAME/FILE``.
        type: Kind of the artifact.
        description: A text.
        metadata: Values that are reported as ``NAME/metadata.json``.
        unused: Options without a counterpart; ignored.
    """

    def __init__(
        self,
        name: str,
        type: str = "",  # noqa: A002 - as wandb
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        **unused: Any,
    ) -> None:
        del unused
        self.name, self.type, self.description = name, type, description
        self.metadata = dict(metadata or {})
        self._files: dict[str, Path] = {}
        self._created: Path | None = None
        """Directory of :meth:`new_file`, removed with the artifact."""

    def add_file(self, local_path: str | Path, name: str | None = None, **unused: Any) -> None:
        """Add a file.

        Args:
            local_path: The file.
            name: Its name in the artifact.
            unused: Options without a counterpart; ignored.

        Raises:
            ValueError: If there is no such file.
        """
        del unused
        path = Path(local_path)
        if not path.is_file():
            msg = f"add_file: must be the path of a file, got {str(local_path)!r}"
            raise ValueError(msg)
        self._files[name or path.name] = path

    def add_dir(self, local_path: str | Path, name: str | None = None, **unused: Any) -> None:
        """Add all files of a directory.

        Args:
            local_path: The directory.
            name: Its name in the artifact.
            unused: Options without a counterpart; ignored.

        Raises:
            ValueError: If there is no such directory.
        """
        del unused
        root = Path(local_path)
        if not root.is_dir():
            msg = f"add_dir: must be the path of a directory, got {str(local_path)!r}"
            raise ValueError(msg)
        prefix = f"{name.strip('/')}/" if name else ""
        for path in sorted(root.rglob("*")):
            if path.is_file():
                self.add_file(path, prefix + path.relative_to(root).as_posix())

    @contextlib.contextmanager
    def new_file(
        self, name: str, mode: str = "x", encoding: str | None = None
    ) -> Iterator[IO[Any]]:
        """Open a new file of the artifact for writing.

        Args:
            name: Its name in the artifact.
            mode: As in ``open``.
            encoding: As in ``open``.
        """
        if self._created is None:
            self._created = Path(tempfile.mkdtemp(prefix="zerolab-artifact-"))
            weakref.finalize(self, shutil.rmtree, self._created, ignore_errors=True)
        path = Path(self._created, str(len(self._files)), Path(name).name)
        path.parent.mkdir(exist_ok=True)
        with path.open(mode, encoding=encoding) as file:
            yield file
        self.add_file(path, name)

    def wait(self, timeout: int | None = None) -> "Artifact":
        """Return the artifact: its files are stored when ``log_artifact`` returns.

        Args:
            timeout: Ignored.
        """
        del timeout
        return self

    def report(self, target: MediaReports, step: int) -> None:
        """Report all files.

        Args:
            target: Receiver of the reports.
            step: Step of the reports.
        """
        for name, path in self._files.items():
            target.report_file(f"{self.name}/{name}", path, step)
        if self.metadata:
            with self.new_file("metadata.json", "wb") as file:
                file.write(msgspec.json.encode(plain(self.metadata)))
            target.report_file(f"{self.name}/metadata.json", self._files["metadata.json"], step)
