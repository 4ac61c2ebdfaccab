"""Documentation: links, code blocks, configuration files and names are valid."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml

import zerotrial
from zerolab.client.transport import error_of
from zerolab.config import check_experiment, load_engine_config, load_experiment
from zerolab.config.experiment.model_files import FolderFiles

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += sorted(ROOT.glob("examples/**/README.md"))
PACKAGES = ("platform/zerolab", "trials/zerotrial", "server/zeroserver")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HPARAMS = {"micro_batch_size": 8, "learning_rate": 1e-3, "max_steps": 10, "warmup_steps": 1}
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


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


def test_site_navigation_lists_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    copies = {"changelog.md", "contribute/contributing.md"}
    copies |= {f"notebooks/{file.stem}.md" for file in ROOT.glob("docs/notebooks/*.ipynb")}
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert sorted(nav) == sorted(pages | copies), "add the page to nav in mkdocs.yml"


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


def test_digits_readme_configuration_is_valid() -> None:
    folder = ROOT / "examples" / "digits"
    (changes,) = (yaml.safe_load(text) for text in blocks(folder / "README.md", "yaml"))
    experiment = yaml.safe_load((folder / "experiment.yaml").read_text(encoding="utf-8"))
    assert check_experiment(experiment | changes, FolderFiles(folder)).searcher.name == "random"


def test_readme_commands_exist() -> None:
    lines = "".join(blocks(ROOT / "README.md", "sh")).splitlines()
    commands = [line.partition("#")[0].split() for line in lines]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {command[1] for command in commands if command[:1] == ["make"]} <= set(targets)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"\.\[(\w+)\]", "".join(lines))
    assert set(extras) <= set(project["optional-dependencies"])
    for _, name, *arguments in [command for command in commands if command[:1] == ["zerolab"]]:
        subprocess.run([sys.executable, "-m", "zerolab", name, "--help"], check=True)
        assert all((ROOT / argument).exists() for argument in arguments)


def test_resume_example_kills_rank_of_newest_run(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "resume" / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^run=.*\nkill -9 .*$", text, re.MULTILINE)
    victim, other = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        runs = tmp_path / "data directory" / "runs"
        for run, process in (("9", other), ("10", victim), ("8", other)):
            (runs / run / "ranks").mkdir(parents=True)
            (runs / run / "ranks" / "1").write_text(f"{process.pid}\n")
        cli = tmp_path / "zerolab"
        cli.write_text(f"#!/bin/sh\necho '{json.dumps({'id': 1, 'run_id': 10}, indent=2)}'\n")
        cli.chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {**os.environ, "ZEROLAB_HOME": str(runs.parent), "PATH": path}
        subprocess.run(["bash", "-c", command], env=environment, check=True)
        assert victim.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (victim, other):
            process.kill()
            process.wait()


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
    text = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", text))
    sources = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    used = {
        name
        for file in sources
        for name in re.findall(r'"(ZEROLAB_[A-Z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert len(used) > 10
    assert used - listed == set()
    assert {name for name in listed if name.startswith("ZEROLAB_")} - used == {"ZEROLAB_REPOSITORY"}


def test_python_reference_lists_public_names() -> None:
    text = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: zerotrial\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(zerotrial.__all__)


def test_error_table_equals_client() -> None:
    reference = ROOT / "docs" / "reference"
    rest = (reference / "rest.md").read_text(encoding="utf-8")
    status = {
        kind: int(number)
        for number, kinds in re.findall(r"^\| (\d{3})[\d, ]* \| (`.+?) \|", rest, re.MULTILINE)
        for kind in re.findall(r"\w+", kinds)
    }
    page = (reference / "errors.md").read_text(encoding="utf-8")
    for kinds, name in re.findall(r"^\| (`.+) \| `(\w+Error)` \|", page, re.MULTILINE):
        for kind in re.findall(r"`(\w+)`", kinds):
            body = {"error": {"type": kind, "message": "x"}}
            response = httpx.Response(status.pop(kind), json=body)
            assert type(error_of(response, "http://x")).__name__ == name
    assert status == {}


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


def test_gallery_lists_every_example() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    folders = {readme.parent.name for readme in ROOT.glob("examples/*/README.md")}
    assert set(re.findall(r"^\| \[\w+\]\((\w+)/README.md\)", text, re.M)) == folders


def test_architecture_lists_optional_modules() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = points["project"]["entry-points"]
    optional = ("zerolab.parts", "zerotrial.engine_parts", "zerotrial.trial_parts")
    registered = {(group, name) for group in optional for name in groups[group]}
    text = (ROOT / "docs/contribute/architecture.md").read_text(encoding="utf-8")
    _, _, table = text.partition("<!-- optional modules -->")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| ", table.partition("<!-- end -->")[0], re.M)
    assert set(rows) == registered
