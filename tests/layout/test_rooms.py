"""The rooms: no import goes in a circle, and no folder is too full to be looked over."""

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
    """Names of the source files of a folder; ``__init__.py`` is the folder itself."""
    kinds = {".py", ".ts", ".tsx"}
    return sorted(
        file.name
        for file in folder.iterdir()
        if file.suffix in kinds and file.name != "__init__.py"
    )


def folders() -> list[Path]:
    """Folders with code that is written here: of the packages, the page, tests and benchmarks."""
    roots = (
        *(ROOT / root / package for root, package in zip(SOURCE_ROOTS, PACKAGES, strict=True)),
        *(ROOT / root for root in ("server/web/src", "benchmarks", "tests", "examples")),
    )
    return [folder for root in roots for folder in root.glob("**/") if sources(folder)]


def prefixes(names: list[str]) -> dict[str, int]:
    """First words that three files or more share; the ``test_`` of tests is no word of theirs."""
    words = Counter(re.split(r"[-_.]", name.removeprefix("test_"))[0] for name in names)
    return {word: count for word, count in words.items() if count > 2}


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Sets of modules each of which imports all others of its set, directly or by others."""
    imports = {module: graph.find_upstream_modules(module) for module in graph.modules}
    found = {
        frozenset(other for other in imported if module in imports[other]) | {module}
        for module, imported in imports.items()
    }
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def test_the_largest_import_circle_is_one_module() -> None:
    # An import inside a function counts, and one that only type checkers see.
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
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
    full = {str(folder.relative_to(ROOT)): len(sources(folder)) for folder in folders()}
    assert len(full) > 90
    assert {folder: count for folder, count in full.items() if count > 15} == {}


def test_a_prefix_that_three_files_share_is_a_folder() -> None:
    shared = {str(folder.relative_to(ROOT)): prefixes(sources(folder)) for folder in folders()}
    assert {folder: found for folder, found in shared.items() if found} == {}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["load.py", "load_ranks.py", "load-files.ts"], {"load": 3}),
        (["test_load.py", "test_load_ranks.py", "load_cases.py"], {"load": 3}),
        (["load.py", "load_ranks.py", "loader.py", "test_save.py", "test_state.py"], {}),
    ],
)
def test_a_shared_prefix_would_be_found(names: list[str], found: dict[str, int]) -> None:
    assert prefixes(names) == found


def test_no_two_exceptions_have_one_name() -> None:
    named = Counter(
        name
        for root in SOURCE_ROOTS
        for file in (ROOT / root).rglob("*.py")
        if "node_modules" not in file.parts
        for name in re.findall(r"^class (\w+Error)\b", file.read_text("utf-8"), re.MULTILINE)
    )
    assert "ZerolabError" in named
    assert [name for name, count in named.items() if count > 1] == []


def test_beside_its_folders_the_engine_has_at_most_8_files() -> None:
    assert len(sources(ROOT / "trials" / "zerotrial" / "engine")) <= 8


def test_the_architecture_page_lists_every_room_in_the_rooms_own_words() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w/]+)` \| (.*) \|$", page, re.MULTILINE))
    rooms = {}
    for root in SOURCE_ROOTS:
        for init in (ROOT / root).rglob("__init__.py"):
            if not {"migrations", "node_modules"} & set(init.parts):
                text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
                first = text.split("\n")[0].replace("``", "`")
                rooms[str(init.parent.relative_to(ROOT))] = first
    assert {room: line for room, line in listed.items() if room in rooms} == rooms
    page_rooms = {room for room in listed if room.startswith("server/web/")}
    known = {str(folder.relative_to(ROOT)) for folder in folders()}
    assert {folder for folder in known if folder.startswith("server/web/")} == page_rooms
