"""The documents are true where a program can tell: links, code, configuration, names."""

import json
import re
from pathlib import Path

import pytest
import yaml

from zerolab.config import load_engine_config, load_experiment
from zerolab.contract import spec as contract

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    """Name a page as a reader of the repository would."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for tongue, text in found if tongue == language]


def anchor(heading: str) -> str:
    """Return the address that a Markdown viewer gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(target)
        elif fragment and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if fragment not in {anchor(heading) for heading in headings}:
                broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_in_the_documents_compiles(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_json_and_yaml_in_the_documents_parse(page: Path) -> None:
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)


def test_the_files_of_the_guide_are_accepted() -> None:
    guide = ROOT / "docs" / "guide.md"
    (engine,) = blocks(guide, "json")
    assert load_engine_config(json.loads(engine)).zero_optimization.stage == 1
    whole, searched = (yaml.safe_load(text) for text in blocks(guide, "yaml"))
    assert load_experiment(whole).searcher.name == "single"
    assert load_experiment(whole | searched).searcher.name == "random"


def test_every_environment_variable_of_the_contract_is_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = [value for key, value in vars(contract).items() if key.startswith("ENV_")]
    assert len(names) >= 4
    assert not [variable for variable in names if variable not in text]


@pytest.mark.parametrize("folder", sorted((ROOT / "examples").glob("*/")), ids=name)
def test_an_example_has_its_parts_and_valid_files(folder: Path) -> None:
    if folder.name == "__pycache__":
        pytest.skip("not an example")
    assert (folder / "README.md").is_file()
    for file in ("experiment.yaml", "smoke.yaml"):
        load_experiment(folder / file)
    for file in folder.glob("*.json"):
        load_engine_config(file)
    assert f"examples/{folder.name}" in "".join(
        page.read_text(encoding="utf-8") for page in PAGES
    ), "no page mentions it"
