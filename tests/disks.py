"""Small file systems that a test can fill."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory; skip the test without permission.

    Args:
        path: Mount point, created here.
        size: Capacity, such as ``1m``.
    """
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if completed.returncode:
        pytest.skip(f"a file system cannot be mounted here: {completed.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
