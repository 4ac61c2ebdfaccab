"""docs/troubleshooting.md: its headings are messages that the code shows."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
OTHERS = (
    "CUDA out of memory",
    "ModuleNotFoundError",
    "My training starts",
    "Ranks of several machines",
    "The page asks",
    "The trial stays",
    "Torch not compiled",
    "[Errno 28]",
    "mat1 and mat2",
)
"""Beginnings of headings that are symptoms, or messages of torch and Python."""
WINDOW = 3
"""Number of consecutive words that heading and code must have in common."""


def _words(text: str) -> list[str]:
    words = re.sub(r"[`'\",:;()]", " ", text).split()
    return ["|" if word[0].isdigit() else word for word in words]


@cache
def _messages() -> str:
    """Return the words of all texts in the code; values and numbers become bars."""
    texts = []
    for folder in ("platform", "trials", "server/zeroserver"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        str(part.value) if isinstance(part, ast.Constant) else "|"
                        for part in node.values
                    )
                    texts.append(" ".join(_words("".join(parts))))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(" ".join(_words(node.value)))
    return "\n".join(texts)


@pytest.mark.parametrize(
    "heading", [heading for heading in HEADINGS if not heading.startswith(OTHERS)]
)
def test_heading_is_a_message(heading: str) -> None:
    words = _words(heading)
    size = min(WINDOW, len(words))
    windows = (" ".join(words[start : start + size]) for start in range(len(words) - size + 1))
    assert any(window in _messages() for window in windows)
