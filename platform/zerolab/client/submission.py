"""Archive and configuration of an experiment from what a user submits."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerolab.client.archive import pack
from zerolab.contract.names import file_name_problem
from zerolab.errors import ConfigError

__all__ = ["read_source"]

Source = str | Path | bytes | Mapping[str, str | bytes] | Callable[..., Any]


def read_source(
    source: Source, config: Mapping[str, Any]
) -> tuple[bytes | str | Path, Mapping[str, Any]]:
    """Return the archive, or its path, and the configuration of a submission.

    Raises:
        ConfigError: If the source or the configuration is invalid.
    """
    if not isinstance(config, Mapping):
        problem = f"config: must be a mapping, got {type(config).__name__}"
        raise ConfigError("submit", [f"{problem}; read a file with `yaml.safe_load`"])
    if isinstance(source, Mapping):
        return _pack_files(source), config
    if isinstance(source, str | Path | bytes):
        return source, config
    if callable(source):
        from zerolab.client.function_source import function_config, function_files

        config = function_config(source, config)
        return _pack_files(function_files(source)), config
    kinds = "a directory, an archive, a mapping of file names to contents or a function"
    raise ConfigError("submit", [f"source: must be {kinds}, got {type(source).__name__}"])


def _pack_files(files: Mapping[str, str | bytes]) -> bytes:
    problems = [
        f"{name!r}: {problem}" for name in files if (problem := file_name_problem(str(name)))
    ]
    if problems:
        raise ConfigError("submit", problems)
    with tempfile.TemporaryDirectory(prefix="zerolab-") as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return pack(folder)
