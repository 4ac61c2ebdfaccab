"""Check the share of unidiomatic sentences: ``python tools/prose_check.py [--max PERCENT] [-v]``.

Looks for markers (MARKERS) in docstrings, comments and test names, and prints the share of
sentences that contain one. A marker is a hint, not an error: write the sentence that you would
want to read, do not dodge words. With ``--subjects RANGE`` the subjects of those commits are
checked as well. Exits with 1 when a share exceeds ``--max``.
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
    r"says? (so|it|which|what|why|how)|come(s)? to|goes on|go on|going on|went on|is meant|"
    r"there (is|are) none|of (its|their|one's|his|the user's) own|in place of|such a one|"
    r"those (that|who|which)|the one(s)? (that|of|which)|that there (is|are)|so many|at hand|"
    r"what (is|are|was|were|it|they|he|one|a|an|the|has|had|must|can|may|no|only|all|this|that|"
    r"every|each|users?|DeepSpeed)|"
    r"does so|do so|so far as|as far as|where (there|it|the|a|none|one|they)|(has|have) it\b|"
    r"is to be|are to be"
    r")\b",
    re.IGNORECASE,
)
WORDS_OF_A_SENTENCE = 4

Text = tuple[str, str]
"""Where a text is (file and line), and the text."""


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


def test_names() -> Iterator[Text]:
    """Yield the names of test functions, as words."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for match in re.finditer(r"def test_(\w+)", path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), match[1].replace("_", " ")


def subjects(revisions: str) -> Iterator[Text]:
    """Yield the subjects of the commits in a range such as ``origin/main..HEAD``."""
    log = subprocess.check_output(
        ["git", "-C", str(ROOT), "log", "--format=%h %s", revisions], text=True
    )
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        yield commit, subject


def share(area: str, texts: Iterator[Text], *, verbose: bool) -> float:
    """Print the share of an area's sentences that contain a marker, and return it in percent."""
    total = marked = 0
    for where, text in texts:
        for sentence in sentences(text):
            total += 1
            if match := MARKERS.search(sentence):
                marked += 1
                if verbose:
                    print(f"{where}: {match[0]!r} in: {sentence}")
    percent = 100 * marked / max(1, total)
    print(f"{area}: {marked} of {total} sentences ({percent:.1f} %)")
    return percent


def main() -> int:
    """Check all areas; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=float, metavar="PERCENT", help="largest share allowed")
    parser.add_argument("--subjects", metavar="RANGE", help="check commits' subjects, too")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each sentence")
    options = parser.parse_args()
    areas = {
        "docstrings": docstrings(*SOURCES),
        "comments": comments(*SOURCES),
        "test names": test_names(),
        "docstrings and comments of tests": chain(docstrings("tests"), comments("tests")),
    }
    if options.subjects:
        areas["commit subjects"] = subjects(options.subjects)
    shares = [share(area, texts, verbose=options.verbose) for area, texts in areas.items()]
    if options.max is not None and max(shares) > options.max:
        print(f"prose: {max(shares):.1f} % have a marker; at most {options.max} % may. See -v.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
