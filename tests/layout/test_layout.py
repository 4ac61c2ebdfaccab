"""The layout law: what may stand where, and what an import may pull in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "trials", "server")
SOURCES = [
    path
    for root in SOURCE_ROOTS
    for path in sorted((ROOT / root).rglob("*.py"))
    if "node_modules" not in path.parts
]

OWNERS = {
    "torch": "trials",
    "fastapi": "server",
    "starlette": "server",
    "sqlalchemy": "server",
    "alembic": "server",
    "yaml": "platform",
}
"""Third-party package -> the only source root that may import it."""


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("folder", [*SOURCE_ROOTS, "tests"])
def test_a_source_root_is_not_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_standard_platform_module_is_found_at_the_repository_root() -> None:
    code = "import platform; print(platform.python_version())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_third_party_package_is_imported_by_its_owner_alone(path: Path) -> None:
    root = path.relative_to(ROOT).parts[0]
    strangers = {name for name in imported(path) if OWNERS.get(name, root) != root}
    assert not strangers


@pytest.mark.parametrize(
    "statement",
    ["import zerolab", "import zerolab.config", "import zerolab.cli.main", "import zerolab.core"],
)
def test_importing_the_control_plane_loads_no_heavy_package(statement: str) -> None:
    heavy = ("torch", "fastapi", "sqlalchemy", "numpy", "alembic")
    code = f"{statement}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_help_text_needs_neither_torch_nor_pydantic_nor_a_database() -> None:
    heavy = ("torch", "fastapi", "sqlalchemy", "pydantic", "httpx")
    code = (
        "import sys; sys.argv = ['zerolab', '--help']\n"
        "from zerolab.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        f"print(code or 0, [m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().endswith("0 []")
    assert "experiment" in done.stdout


def test_every_dependency_has_its_reason_beside_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = lines.index("dependencies = [")
    end = lines.index("]", start)
    assert all("#" in line for line in lines[start + 1 : end])


def test_the_engine_raises_errors_of_engine_and_configuration_only() -> None:
    allowed = {"ConfigError", "EngineError", "NotFoundError", "StorageError", "ZerolabError"}
    found = {
        (path.name, name.name)
        for path in SOURCES
        if "engine" in path.relative_to(ROOT).parts and path.is_relative_to(ROOT / "trials")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "zerolab.errors"
        for name in node.names
    }
    assert found
    assert {name for _, name in found} <= allowed, found
