"""Paths of a module's source, in Python's search order."""

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from zerolab.syntax import module_paths


@pytest.mark.parametrize(
    ("name", "paths"),
    [("a", ("a/__init__.py", "a.py")), ("a.b", ("a/b/__init__.py", "a/b.py"))],
)
def test_module_paths(name: str, paths: tuple[str, ...]) -> None:
    assert module_paths(name) == paths


def test_module_paths_have_import_order(tmp_path: Path) -> None:
    first, second = (tmp_path / path for path in module_paths("some_module"))
    for file in (second, first):
        file.parent.mkdir(exist_ok=True)
        file.touch()
        PathFinder.invalidate_caches()
        spec = PathFinder.find_spec("some_module", [str(tmp_path)])
        assert spec is not None
        assert spec.origin == str(file)
