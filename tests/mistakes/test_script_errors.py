"""Reasons of failed scripts: file and line of the user's code, the error, and a remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.contract.outcome import first_failure
from zerolab.contract.run_folder import RunFolder


def reason_of_script(tmp_path: Path, files: dict[str, str], *options: str) -> str:
    """Run ``train.py`` like a rank, and return the reason of its failure."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for name, text in files.items():
        (folder.model / name).parent.mkdir(exist_ok=True)
        (folder.model / name).write_text(text)
    with folder.stderr(0).open("wb") as stderr:
        command = [sys.executable, *options, "train.py"]
        done = subprocess.run(command, cwd=folder.model, stderr=stderr, check=False)
    return first_failure(folder.path, 0, done.returncode).reason or ""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.py": "x = 1\nraise ValueError('no')\n"}, "train.py:2: ValueError: no (in: raise"),
        ({"train.py": "import a.b\n", "a/b.py": "\n1 / 0\n"}, "a/b.py:2: ZeroDivisionError: "),
        ({"train.py": "import json\n\njson.loads('{')\n"}, "train.py:3: json.decoder.JSONDecode"),
        ({"train.py": "def f(:\n  pass\n"}, "train.py:1: SyntaxError: "),
        ({"train.py": "def f():\nx = 1\n"}, "train.py:2: IndentationError: "),
        ({"train.py": "try:\n  1 / 0\nexcept:\n  raise OSError('x')\n"}, "train.py:4: OSError"),
        ({"train.py": "raise ValueError('a\\n  b\\n')\n"}, "train.py:1: ValueError: a; b"),
        ({"train.py": "assert 0\n"}, "train.py:1: AssertionError (in: assert 0)"),
        ({"train.py": "import sys\nsys.exit('stop: no data')\n"}, "code 1: stop: no data"),
        (
            {"train.py": "import atexit, sys\natexit.register(lambda: print('synced', file=sys."
             "stderr))\nraise KeyError('k')\n"},
            "synced; the last traceback: train.py:3: KeyError: 'k' (in: raise",
        ),
        (
            {"train.py": "import subprocess, sys\nsubprocess.run([sys.executable, 't.py'], "
             "check=True)\n", "t.py": "\nraise ValueError('inner')\n"},
            "code 1: t.py:2: ValueError: inner (in: raise",
        ),
    ],
)  # fmt: skip
def test_reason_has_file_and_line(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert expected in reason_of_script(tmp_path, files)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import timmm\n", f"{sys.executable} on "),
        ("import netz\n", "did you mean 'nets' of the model directory?"),
        ("from .nets import x\n", "by its name, e.g. `from nets import Net`"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')\n", "context.to_device"),
        ("raise RuntimeError('Found no NVIDIA driver on your system.')\n", "or a GPU slot"),
    ],
)
def test_reason_has_remedy(tmp_path: Path, text: str, expected: str) -> None:
    reason = reason_of_script(tmp_path, {"train.py": text, "nets.py": "x = 1\n"})
    assert reason.startswith("rank 0 exited with code 1: train.py:1: ")
    assert expected in reason


def test_reason_without_traceback_is_the_last_line(tmp_path: Path) -> None:
    text = "import sys\nprint('a', file=sys.stderr)\nprint('b c', file=sys.stderr)\nsys.exit(3)\n"
    reason = reason_of_script(tmp_path, {"train.py": text})
    assert reason == "rank 0 exited with code 3: b c"
