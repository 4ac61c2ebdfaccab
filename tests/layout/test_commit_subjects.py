"""Commits whose subjects ``make check`` checks for plain language."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prose_check.py"
PLAIN, VAGUE = "server: describe the new route", "server: nobody stands where it goes on"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def commit(folder: Path, *subjects: str) -> None:
    for subject in subjects:
        git(folder, "commit", "-q", "--allow-empty", "-m", subject)


def check(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "tools/prose_check.py", "--max", "3", "--subjects"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, next(x for x in done.stdout.splitlines() if x.startswith("commit"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(TOOL, folder / "tools")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    commit(folder, PLAIN)
    return folder


def test_without_tag_and_remote_newest_commits(repository: Path) -> None:
    commit(repository, VAGUE)
    assert check(repository) == (0, "commit subjects: 1 of 2 sentences (50.0 %)")
    commit(repository, VAGUE)
    assert check(repository) == (1, "commit subjects: 2 of 3 sentences (66.7 %)")


def test_only_commits_since_the_tag(repository: Path) -> None:
    commit(repository, VAGUE, VAGUE)
    git(repository, "tag", "v1")
    commit(repository, PLAIN)
    assert check(repository) == (0, "commit subjects: 0 of 1 sentences (0.0 %)")


def test_only_commits_of_the_branch(repository: Path, tmp_path: Path) -> None:
    commit(repository, VAGUE, VAGUE)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    commit(clone, PLAIN)
    assert check(clone) == (0, "commit subjects: 0 of 1 sentences (0.0 %)")


def test_removed_words_are_not_counted(repository: Path) -> None:
    commit(repository, *["docs: use plain words everywhere instead of nobody and goes on"] * 2)
    assert check(repository) == (0, "commit subjects: 0 of 3 sentences (0.0 %)")


def test_shallow_clone(repository: Path, tmp_path: Path) -> None:
    commit(repository, VAGUE, VAGUE, PLAIN)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", "--depth", "1", repository.as_uri(), str(clone))
    assert check(clone) == (0, "commit subjects: 0 of 1 sentences (0.0 %)")


def test_without_git_checkout(repository: Path) -> None:
    shutil.rmtree(repository / ".git")
    assert check(repository) == (0, "commit subjects: 0 of 0 sentences (0.0 %)")
