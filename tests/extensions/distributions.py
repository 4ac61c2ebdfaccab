"""Wheels of toy extensions, installed with pip into a folder."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    name: str,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> None:
    """Install a distribution with ``pip install --target``.

    Args:
        folder: Where it is installed; a folder of ``PYTHONPATH``.
        name: Name of the distribution.
        modules: File name of each module to its source.
        entry_points: Group to names to ``module:object``.
    """
    info = f"{name}-1.0.dist-info"
    points = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items())
        for group, names in entry_points.items()
    )
    files = {
        **modules,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    record = "".join(
        f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder.parent / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command = [*pip, "--no-deps", "--no-index", "--upgrade", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
