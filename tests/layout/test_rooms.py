"""The rooms: no import goes in a circle, and no folder is too full to be looked over."""

from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zerolab", "zerotrial", "zeroserver")


def sources(folder: Path) -> list[str]:
    """Names of the source files of a folder; ``__init__.py`` is the folder itself."""
    kinds = {".py", ".ts", ".tsx"}
    return sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in kinds and file.name != "__init__.py"
    )


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Sets of modules each of which imports all others of its set, directly or by others."""
    imports = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {
        frozenset(other for other in imported if module in imports[other]) | {module}
        for module, imported in imports.items()
    }
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def test_the_largest_import_circle_is_one_module() -> None:
    # An import inside a function counts; one that only type checkers see does not.
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 200
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e")]:
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]


def test_a_folder_holds_at_most_15_source_files() -> None:
    roots = ("platform/zerolab", "trials/zerotrial", "server/zeroserver", "server/web/src")
    folders = [folder for root in roots for folder in (ROOT / root, *(ROOT / root).glob("**/"))]
    assert len(folders) > 30
    full = {str(folder.relative_to(ROOT)): len(sources(folder)) for folder in folders}
    assert {folder: count for folder, count in full.items() if count > 15} == {}


def test_beside_its_folders_the_engine_has_at_most_8_files() -> None:
    assert len(sources(ROOT / "trials" / "zerotrial" / "engine")) <= 8
