"""docs/get_started: a user who follows the tutorials gets what they show."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.tutorial import Walkthrough, files_of
from zerolab.config import check_experiment
from zerolab.config.experiment.model_files import FolderFiles

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "get_started"
TUTORIALS = ("first_experiment.md", "first_search.md", "first_script.md")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.needs_extension("tpe_asha")
@pytest.mark.parametrize("names", [TUTORIALS[:1], pytest.param(TUTORIALS, marks=pytest.mark.soak)])
def test_tutorials_print_what_they_show(tmp_path: Path, names: tuple[str, ...]) -> None:
    user = Walkthrough(tmp_path, tmp_path / "zerolab-home")
    try:
        for name in names:
            user.follow(PAGES / name)
    finally:
        user.run("zerolab down")


@pytest.mark.parametrize("name", TUTORIALS)
def test_experiment_files_are_valid(name: str, tmp_path: Path) -> None:
    for page in TUTORIALS[: TUTORIALS.index(name) + 1]:
        for file, text in files_of(PAGES / page):
            (tmp_path / file).write_text(text)
    experiments = [text for file, text in files_of(PAGES / name) if file.endswith(".yaml")]
    assert experiments
    for text in experiments:
        check_experiment(yaml.safe_load(text), FolderFiles(tmp_path))


def test_install_page_lists_all_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (PAGES / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    packages = {
        extra: ", ".join(re.split(r"[>=\[]", name)[0] for name in names)
        for extra, names in project["optional-dependencies"].items()
    }
    assert rows == packages
