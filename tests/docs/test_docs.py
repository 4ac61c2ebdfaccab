"""Documentation: links, code blocks, configuration files and names are valid."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from zerolab.config import check_experiment, check_file, load_engine_config, load_experiment
from zerolab.config.experiment.model_files import FolderFiles
from zerolab.contract import spec as contract

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HPARAMS = {"micro_batch_size": 8, "learning_rate": 1e-3, "max_steps": 10, "warmup_steps": 1}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def page_name(page: Path) -> str:
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    matches = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for block_language, text in matches if block_language == language]


def anchor(heading: str) -> str:
    """Return the anchor that a Markdown viewer gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_resolve(page: Path) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_compile(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, page_name(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_json_and_yaml_blocks_are_valid(
    page: Path,
) -> None:
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "yaml"):
        content = yaml.safe_load(text)
        if isinstance(content, dict) and {"entrypoint", "searcher"} <= content.keys():
            load_experiment(content)


def test_guide_files_are_valid() -> None:
    guide = ROOT / "docs" / "guide.md"
    (engine,) = blocks(guide, "json")
    assert load_engine_config(json.loads(engine)).zero_optimization.stage == 1
    experiment, search = (yaml.safe_load(text) for text in blocks(guide, "yaml"))
    assert load_experiment(experiment).searcher.name == "single"
    assert load_experiment(experiment | search).searcher.name == "random"


def test_digits_readme_configuration_is_valid() -> None:
    folder = ROOT / "examples" / "digits"
    (changes,) = (yaml.safe_load(text) for text in blocks(folder / "README.md", "yaml"))
    experiment = yaml.safe_load((folder / "experiment.yaml").read_text(encoding="utf-8"))
    assert check_experiment(experiment | changes, FolderFiles(folder)).searcher.name == "random"


def test_readme_files_are_valid(tmp_path: Path) -> None:
    write_readme_files(tmp_path)
    assert check_file(tmp_path).startswith(f"{tmp_path}/experiment.yaml: ok")


@pytest.mark.slow
def test_readme_example_trains(tmp_path: Path) -> None:
    write_readme_files(tmp_path)
    hparams = yaml.safe_load((tmp_path / "experiment.yaml").read_text())["hyperparameters"]
    (tmp_path / "train.py").write_text(
        "import zerotrial\nfrom model_def import DigitsTrial\n\n"
        f"with zerotrial.init(hparams={hparams!r}, seed=1) as context:\n"
        "    fit = zerotrial.Trainer(DigitsTrial(context), context).fit\n"
        "    fit(max_length=zerotrial.Epoch(3), validation_period=zerotrial.Epoch(1))\n"
    )
    environment = {key: value for key, value in os.environ.items() if "RANK" not in key}
    command = [sys.executable, "train.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    records = (tmp_path / "zerolab_run" / "metrics.jsonl").read_text()
    matches = [float(value) for value in re.findall(r'"accuracy":([0-9.]+)', records)]
    assert len(matches) == 3
    assert matches[-1] > 0.8


def write_readme_files(folder: Path) -> None:
    """Write the three files that the README shows."""
    for language, file in (
        ("python", "model_def.py"),
        ("yaml", "experiment.yaml"),
        ("json", "ds_config.json"),
    ):
        (text,) = blocks(ROOT / "README.md", language)
        (folder / file).write_text(text)


def test_resume_example_kills_rank_of_zerolab_home(
    tmp_path: Path,
) -> None:
    text = (ROOT / "examples" / "resume" / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^kill -9 .*$", text, re.MULTILINE)
    victim = subprocess.Popen(["sleep", "600"])
    try:
        ranks = tmp_path / "data directory" / "runs" / "7" / "ranks"
        ranks.mkdir(parents=True)
        (ranks / "1").write_text(f"{victim.pid}\n")
        environment = {**os.environ, "ZEROLAB_HOME": str(ranks.parents[2])}
        subprocess.run(["bash", "-c", command], env=environment, check=True)
        assert victim.wait() == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()


def test_make_demo_prints_installation_steps(
    tmp_path: Path,
) -> None:
    for file in ("pyproject.toml", "hatch_build.py", "server/web/package-lock.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    programs = {"python": "exit 1", "pip": 'echo "pip $*"', "zerolab": 'echo "zerolab $*"'}
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv").mkdir()
    for program, body in programs.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "demo", f"BIN={tmp_path}/bin"]
    completed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    first_words = [line.partition(" ")[0] for line in completed.stdout.splitlines()]
    assert first_words == ["Installing", "1", "pip", "2", "pip", "zerolab"]
    assert all("minute" in line for line in completed.stdout.splitlines() if " of 2: " in line)
    second_run = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert second_run.stdout.startswith("zerolab run ")


def test_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_bytes().strip()
    assert text.startswith(b"Apache License")
    assert b"Version 2.0, January 2004" in text
    assert text.endswith(b"limitations under the License.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_environment_variables_are_documented() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = [value for key, value in vars(contract).items() if key.startswith("ENV_")]
    assert len(names) >= 4
    assert not [variable for variable in names if variable not in text]


@pytest.mark.parametrize("folder", sorted((ROOT / "examples").glob("*/")), ids=page_name)
def test_example_has_readme_and_valid_files(folder: Path) -> None:
    if folder.name == "__pycache__":
        pytest.skip("not an example")
    assert (folder / "README.md").is_file()
    experiments = {"experiment.yaml", "smoke.yaml"} & {file.name for file in folder.iterdir()}
    scripts = [*folder.glob("train.py"), *folder.glob("*.sh")]
    assert "experiment.yaml" in experiments or (not experiments and scripts)
    for file in experiments:
        load_experiment(folder / file)
    for file in folder.glob("*.json"):  # "auto" is filled in by the script
        load_engine_config(file, hyperparameters=HPARAMS)
    assert f"examples/{folder.name}" in "".join(
        page.read_text(encoding="utf-8") for page in PAGES
    ), "no page mentions it"


def test_architecture_lists_optional_modules() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = points["project"]["entry-points"]
    optional = ("zerolab.parts", "zerotrial.engine_parts", "zerotrial.trial_parts")
    registered = {(group, name) for group in optional for name in groups[group]}
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    _, _, table = text.partition("<!-- optional modules -->")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| ", table.partition("<!-- end -->")[0], re.M)
    assert set(rows) == registered
