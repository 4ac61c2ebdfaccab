"""Check the share of unidiomatic sentences: ``python tools/prose_check.py [--max PERCENT] [-v]``.

Looks for markers (MARKERS) in docstrings, comments, messages and test names, and prints the share
of sentences that contain one. Messages are the texts of errors, logs and help pages. A marker is a
hint, not an error: write the sentence that you would want to read, do not dodge words.
``--docs`` checks the pages of the manual as well.
``--subjects`` checks the subjects of new commits as well, or ``--subjects RANGE`` those of a range.
Exits with 1 when a share exceeds ``--max``; one marked subject is always accepted, because pushed
commits cannot be changed.
"""

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("platform", "trials", "server")
MARKERS = re.compile(
    r"\b("
    r"told|tells?|anew|stands?|stood|nobody|all the same|meanwhile|besides|wish(es)?|shall|lies|"
    r"says (so|it|which|what|why|how)|say (so|it|which|what)|come(s)? to|"
    r"goes on|go on|going on|went on|is meant|"
    r"there (is|are) none|of (its|their|one's|his|the user's) own|in place of|such a one|"
    r"those (that|who|which)|the one(s)? (that|of|which)|that there (is|are)|so many|at hand|"
    r"what (is|are|was|were|it|they|he|one|a|an|the|has|had|must|can|may|no|only|all|this|that|"
    r"every|each|users?|DeepSpeed)|"
    r"does so|do so|so far as|as far as|where (there|it|the|a|none|one|they)|(has|have) it\b|"
    r"is to be|are to be"
    r")\b",
    re.IGNORECASE,
)
MESSAGE_MARKERS = re.compile(
    MARKERS.pattern
    + r"|\b(taken? for|heard of|ask again|through with|trains on|is gone|are gone|any more|"
    r"no more of|is (still )?there|are (still )?there(?! at)|to leave|at all|in vain|"
    r"by itself|by themselves)\b",
    re.IGNORECASE,
)
"""Markers of messages."""
REMOVED = re.compile(r"\b(replace|remove|instead of)\b.*")
"""Part of a commit's subject that names what the commit removes."""
WORDS_OF_A_SENTENCE = 4
NEW_COMMITS = 30
"""Number of commits that are new where neither a branch nor a tag shows it."""

Text = tuple[str, str]
"""File and line of a text, and the text."""


def sentences(text: str) -> Iterator[str]:
    """Split a text into sentences of at least four words, without code blocks."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    for sentence in re.split(r"(?<=[.:;!?])\s+|\n\s*\n|\n[-*|]", text):
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= WORDS_OF_A_SENTENCE:
            yield " ".join(sentence.split())


def python_files(*folders: str) -> Iterator[Path]:
    """Yield the Python files of some folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield path


def docstrings(*folders: str) -> Iterator[Text]:
    """Yield the docstrings of modules, classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in python_files(*folders):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def comments(*folders: str) -> Iterator[Text]:
    """Yield the comments, without those for tools."""
    for path in python_files(*folders):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    text = token.string.lstrip("# ")
                    if not text.startswith(("noqa", "type:")):
                        yield f"{path.relative_to(ROOT)}:{token.start[0]}", text


def messages(*folders: str) -> Iterator[Text]:
    """Yield the strings that are not docstrings; a placeholder is written as ``N``."""
    for path in python_files(*folders):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "N" for part in node.values
                ]
                skipped.update(id(part) for part in node.values)
                text = "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if id(node) not in skipped:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def pages() -> Iterator[Text]:
    """Yield the Markdown pages of the manual and of the examples, without code blocks."""
    for path in sorted((*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
        yield str(path.relative_to(ROOT)), text


def test_names() -> Iterator[Text]:
    """Yield the names of test functions, as words."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for match in re.finditer(r"def test_(\w+)", path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), match[1].replace("_", " ")


def git(*arguments: str) -> str:
    """Return what a git command prints; empty if it fails, for example outside of a checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def new_commits() -> list[str]:
    """Return arguments of ``git log`` for the commits of this branch, or since the last release.

    A shallow clone, or one without remote and tags, has neither: then the newest ones.
    """
    head = git("rev-parse", "HEAD")
    bases = [git("merge-base", "HEAD", branch) for branch in ("origin/HEAD", "origin/main")]
    if tag := git("describe", "--tags", "--abbrev=0"):
        bases.append(git("rev-list", "-n1", tag))
    for base in bases:
        if base and base != head:
            return [f"{base}..HEAD"]
    return [f"-{NEW_COMMITS}"]


def subjects(*revisions: str) -> Iterator[Text]:
    """Yield the subjects of the commits that arguments of ``git log`` select."""
    for line in git("log", "--no-merges", "--format=%h %s", *revisions).splitlines():
        commit, _, subject = line.partition(" ")
        yield commit, REMOVED.sub("", subject)


def share(
    area: str,
    texts: Iterator[Text],
    *,
    verbose: bool,
    accepted: int = 0,
    markers: re.Pattern[str] = MARKERS,
) -> float:
    """Print the share of an area's sentences that contain a marker.

    Returns:
        The share in percent; 0 if no more than ``accepted`` sentences contain one.
    """
    total = marked = 0
    for where, text in texts:
        for sentence in sentences(text):
            total += 1
            if match := markers.search(sentence):
                marked += 1
                if verbose:
                    print(f"{where}: {match[0]!r} in: {sentence}")
    percent = 100 * marked / max(1, total)
    print(f"{area}: {marked} of {total} sentences ({percent:.1f} %)")
    return percent if marked > accepted else 0.0


def main() -> int:
    """Check all areas; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=float, metavar="PERCENT", help="largest share allowed")
    parser.add_argument(
        "--subjects", nargs="?", const="", metavar="RANGE", help="check subjects of commits, too"
    )
    parser.add_argument("--docs", action="store_true", help="check the pages of the manual, too")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each sentence")
    options = parser.parse_args()
    areas = {
        "docstrings": docstrings(*SOURCES),
        "comments": comments(*SOURCES),
        "test names": test_names(),
        "docstrings and comments of tests": chain(docstrings("tests"), comments("tests")),
    }
    shares = [share(area, texts, verbose=options.verbose) for area, texts in areas.items()]
    texts = messages(*SOURCES)
    shares.append(share("messages", texts, verbose=options.verbose, markers=MESSAGE_MARKERS))
    if options.docs:
        shares.append(share("docs", pages(), verbose=options.verbose))
    if options.subjects is not None:
        found = subjects(*([options.subjects] if options.subjects else new_commits()))
        shares.append(share("commit subjects", found, verbose=options.verbose, accepted=1))
    if options.max is not None and max(shares) > options.max:
        print(f"prose: {max(shares):.1f} % have a marker; at most {options.max} % may. See -v.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
