"""CHANGELOG.md: versions, groups, short entries and plain words."""

import re
from pathlib import Path

import zerolab
from tools.prose_check import MARKERS, sentences

CHANGELOG = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
GROUPS = ["Breaking", "New", "Changed", "Fixed"]
LINES_OF_ENTRY = 3
CHARACTERS_OF_LINE = 100
MARKED_PERCENT = 3


def versions() -> dict[str, str]:
    """Return the text of each version by its heading, newest first."""
    _, *parts = re.split(r"^## (.*)\n", CHANGELOG.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def entries(text: str) -> list[str]:
    """Return the list entries of a text, with their continuation lines."""
    return re.findall(r"^- .*\n(?:  .*\n)*", text, re.MULTILINE)


def test_changelog_begins_with_current_version() -> None:
    newest = next(iter(versions()))
    version = re.escape(zerolab.__version__)
    assert re.fullmatch(version + r" \((\d{4}-\d\d-\d\d|unreleased)\)", newest)


def test_changelog_groups_are_in_order() -> None:
    for text in versions().values():
        groups = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert groups == [group for group in GROUPS if group in groups]


def test_changelog_entries_are_short() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    assert not [entry for entry in entries(text) if entry.count("\n") > LINES_OF_ENTRY]
    assert not [line for line in text.splitlines() if len(line) > CHARACTERS_OF_LINE]


def test_changelog_prose_is_plain() -> None:
    text = CHANGELOG.read_text(encoding="utf-8")
    texts = [sentence for entry in entries(text) for sentence in sentences(entry)]
    marked = [sentence for sentence in texts if MARKERS.search(sentence)]
    assert 100 * len(marked) <= MARKED_PERCENT * len(texts), marked
