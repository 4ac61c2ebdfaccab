"""Layout of the source roots, and the packages that an import may load."""

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
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("folder", [*SOURCE_ROOTS, "tests"])
def test_source_root_is_not_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_platform_module_of_python_is_importable() -> None:
    code = "import platform; print(platform.python_version())"
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip()


def test_third_party_imports_only_in_owner_root() -> None:
    foreign = {}
    for path in SOURCES:
        file = path.relative_to(ROOT)
        names = {
            name for name in imported(path) if OWNERS.get(name, file.parts[0]) != file.parts[0]
        }
        if names:
            foreign[str(file)] = names
    assert foreign == {}


@pytest.mark.parametrize(
    "statement",
    ["import zerolab", "import zerolab.config", "import zerolab.cli.main", "import zerolab.core"],
)
def test_platform_imports_no_heavy_package(statement: str) -> None:
    heavy = ("torch", "fastapi", "sqlalchemy", "numpy", "alembic")
    code = f"{statement}; import sys; print([m for m in {heavy!r} if m in sys.modules])"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_core_api_starts_without_lazy_modules(tmp_path: Path) -> None:
    """They are half of the CPU time in which a script starts."""
    code = (
        "import sys, zerolab.core\n"
        "with zerolab.core.init(): pass\n"
        "print([m for m in ('pydantic', 'httpx._main', 'rich') if m in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert completed.stdout.strip() == "[]"


def test_help_imports_no_heavy_package() -> None:
    heavy = ("torch", "fastapi", "sqlalchemy", "pydantic", "httpx")
    code = (
        "import sys; sys.argv = ['zerolab', '--help']\n"
        "from zerolab.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        f"print(code or 0, [m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stderr.strip().endswith("0 []")
    assert "experiment" in completed.stdout


def test_server_start_imports_no_lazy_module() -> None:
    code = (
        "import sys, zeroserver.__main__ as main\n"
        "sys.argv = ['zeroserver', '--help']\n"
        "try:\n    main.start()\nexcept SystemExit:\n    pass\n"
        "roots = ('pydantic.v1.', 'zerolab.schema.', 'zerolab.config.', 'zerolab.searcher.asha.')\n"
        "print([m for m in sys.modules if m.startswith(roots)], file=sys.stderr)\n"
        "from fastapi._compat.shared import is_pydantic_v1_model_class\n"
        "print(is_pydantic_v1_model_class(int), 'zeroserver.app' in sys.modules, file=sys.stderr)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stderr.splitlines()[-2:] == ["[]", "False True"]


def test_dependencies_have_a_comment() -> None:
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    start = lines.index("dependencies = [")
    end = lines.index("]", start)
    assert all("#" in line for line in lines[start + 1 : end])


def test_engine_imports_only_its_errors() -> None:
    allowed = {"ConfigError", "EngineError", "NotFoundError", "StorageError", "ZerolabError"}
    names = {
        (path.name, name.name)
        for path in SOURCES
        if "engine" in path.relative_to(ROOT).parts and path.is_relative_to(ROOT / "trials")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "zerolab.errors"
        for name in node.names
    }
    assert names
    assert {name for _, name in names} <= allowed, names


GROUP_FUNCTIONS = {
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
    "init_device_mesh",
}
"""Functions of torch.distributed that create groups."""


def makes_groups(source: str) -> bool:
    """Return whether a file uses a function that creates groups, or calls ``DeviceMesh``."""
    nodes = list(ast.walk(ast.parse(source)))
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    owners = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    imported_names = {node.name for node in nodes if isinstance(node, ast.alias)}
    names = {last_name(node) for node in nodes} | imported_names
    return bool(names & GROUP_FUNCTIONS) or "DeviceMesh" in {
        last_name(node) for node in [*called, *owners]
    }


def last_name(node: ast.AST) -> str | None:
    """Return the last part of a dotted name: ``new_group`` of ``dist.new_group``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def test_only_the_mesh_makes_groups() -> None:
    names = {str(path.relative_to(ROOT)) for path in SOURCES if makes_groups(path.read_text())}
    mesh = "trials/zerotrial/engine/mesh.py"
    reexported = "trials/zerotrial/extensions/deepspeed_api/names/comm.py"  # calls none
    assert names == {mesh, reexported}
    assert makes_groups("from torch import distributed as d; d.DeviceMesh('cpu', [0])")
    assert makes_groups("DeviceMesh.from_group(group, 'cpu')")
    assert not makes_groups("def take(mesh: DeviceMesh) -> None: ...")
