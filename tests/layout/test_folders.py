"""Folders and imports: no import cycles, and no folder with too many files."""

import ast
import re
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("platform", "trials", "server")
PACKAGES = ("zerolab", "zerotrial", "zeroserver")


def sources(folder: Path) -> list[str]:
    """Return the names of a folder's source files, without ``__init__.py``."""
    suffixes = {".py", ".ts", ".tsx"}
    return sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in suffixes and file.name != "__init__.py"
    )


def folders() -> list[Path]:
    """Return the folders with source code: packages, web page, tests, benchmarks, examples."""
    roots = (
        *(ROOT / root / package for root, package in zip(SOURCE_ROOTS, PACKAGES, strict=True)),
        *(ROOT / root for root in ("server/web/src", "benchmarks", "tests", "examples")),
    )
    return [folder for root in roots for folder in root.glob("**/") if sources(folder)]


def prefixes(names: list[str]) -> dict[str, int]:
    """Return first words that at least three file names share, ignoring ``test_``."""
    first_words = Counter(re.split(r"[-_.]", name.removeprefix("test_"))[0] for name in names)
    return {word: count for word, count in first_words.items() if count > 2}


def import_cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return sets of modules that import each other, directly or indirectly."""
    imports = {module: graph.find_upstream_modules(module) for module in graph.modules}
    result = {
        frozenset(other for other in imported if module in imports[other]) | {module}
        for module, imported in imports.items()
    }
    return sorted(sorted(cycle) for cycle in result if len(cycle) > 1)


def test_no_import_cycles() -> None:
    # Imports inside functions and under TYPE_CHECKING count.
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    assert len(graph.modules) > 200
    assert import_cycles(graph) == []


def test_import_cycles_are_detected() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e")]:
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported)
    assert import_cycles(graph) == [["a", "b", "c"]]


def test_folder_has_at_most_15_files() -> None:
    counts = {str(folder.relative_to(ROOT)): len(sources(folder)) for folder in folders()}
    assert len(counts) > 90
    del counts["server/zeroserver/store/migrations/versions"]  # every change of the schema adds one
    assert {folder: count for folder, count in counts.items() if count > 15} == {}


def test_shared_file_prefix_is_a_folder() -> None:
    shared = {str(folder.relative_to(ROOT)): prefixes(sources(folder)) for folder in folders()}
    assert {folder: result for folder, result in shared.items() if result} == {}


@pytest.mark.parametrize(
    ("names", "result"),
    [
        (["load.py", "load_ranks.py", "load-files.ts"], {"load": 3}),
        (["test_load.py", "test_load_ranks.py", "load_cases.py"], {"load": 3}),
        (["load.py", "load_ranks.py", "loader.py", "test_save.py", "test_state.py"], {}),
    ],
)
def test_shared_prefixes_are_detected(names: list[str], result: dict[str, int]) -> None:
    assert prefixes(names) == result


def test_exception_names_are_unique() -> None:
    class_names = Counter(
        name
        for root in SOURCE_ROOTS
        for file in (ROOT / root).rglob("*.py")
        if "node_modules" not in file.parts
        for name in re.findall(r"^class (\w+Error)\b", file.read_text("utf-8"), re.MULTILINE)
    )
    assert "ZerolabError" in class_names
    assert [name for name, count in class_names.items() if count > 1] == []


def test_engine_has_at_most_8_top_level_files() -> None:
    assert len(sources(ROOT / "trials" / "zerotrial" / "engine")) <= 8


def test_architecture_page_lists_packages() -> None:
    page = (ROOT / "docs" / "contribute" / "architecture.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w/]+)` \| (.*) \|$", page, re.MULTILINE))
    summaries = {}
    for root in SOURCE_ROOTS:
        for init in (ROOT / root).rglob("__init__.py"):
            if not {"migrations", "node_modules"} & set(init.parts):
                text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
                first = text.split("\n")[0].replace("``", "`")
                summaries[str(init.parent.relative_to(ROOT))] = first
    assert {folder: line for folder, line in listed.items() if folder in summaries} == summaries
    page_folders = {folder for folder in listed if folder.startswith("server/web/")}
    all_folders = {str(folder.relative_to(ROOT)) for folder in folders()}
    assert {folder for folder in all_folders if folder.startswith("server/web/")} == page_folders
