"""Copies of examples that train on digits, whose ranks read the images without scikit-learn."""

import importlib.util
import shutil
from pathlib import Path

__all__ = ["copy_example"]

_IMPORT = "from sklearn.datasets import load_digits\n"
_READER = '''
from types import SimpleNamespace
import numpy

def load_digits():
    """Read the images of scikit-learn, whose import takes each rank two seconds."""
    table = numpy.loadtxt({path!r}, delimiter=",")
    return SimpleNamespace(data=table[:, :-1], target=table[:, -1].astype(int))
'''


def copy_example(example: Path, folder: Path) -> Path:
    """Copy the directory of an example; return the copy."""
    shutil.copytree(
        example, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    images = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    (folder / "digits_file.py").write_text(_READER.format(path=str(images)))
    model = folder / "model_def.py"
    text = model.read_text()
    assert _IMPORT in text
    model.write_text(text.replace(_IMPORT, "from digits_file import load_digits\n"))
    return folder
