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


def test_a_server_is_loaded_without_what_no_request_has_asked_for() -> None:
    code = (
        "import sys, zeroserver.__main__ as main\n"
        "sys.argv = ['zeroserver', '--help']\n"
        "try:\n    main.start()\nexcept SystemExit:\n    pass\n"
        "roots = ('pydantic.v1.', 'zerolab.schema.', 'zerolab.config.', 'zerolab.searcher.asha.')\n"
        "print([m for m in sys.modules if m.startswith(roots)], file=sys.stderr)\n"
        "from fastapi._compat.shared import is_pydantic_v1_model_class\n"
        "print(is_pydantic_v1_model_class(int), 'zeroserver.app' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-2:] == ["[]", "False True"]


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


MAKERS = {
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
}
"""Functions of torch.distributed that make groups."""


def makes_groups(source: str) -> bool:
    """Whether a file names a function that makes groups, or does more than name ``DeviceMesh``."""
    nodes = list(ast.walk(ast.parse(source)))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    asked = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    imported_names = {node.name for node in nodes if isinstance(node, ast.alias)}
    names = {bare(node) for node in nodes} | imported_names
    return bool(names & MAKERS) or "DeviceMesh" in {bare(node) for node in [*called, *asked]}


def bare(node: ast.AST) -> str | None:
    """The last word of a name: ``dist.new_group`` is ``new_group``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def test_the_mesh_alone_makes_groups() -> None:
    found = {str(path.relative_to(ROOT)) for path in SOURCES if makes_groups(path.read_text())}
    mesh = "trials/zerotrial/engine/mesh.py"
    reexported = "trials/zerotrial/compat/deepspeed/names/comm.py"  # for scripts: it calls none
    assert found == {mesh, reexported}
    assert makes_groups("from torch import distributed as d; d.DeviceMesh('cpu', [0])")
    assert makes_groups("DeviceMesh.from_group(group, 'cpu')")
    assert not makes_groups("def take(mesh: DeviceMesh) -> None: ...")
