"""Check the share of vague identifiers: ``python tools/identifier_check.py [--max PERCENT] [-v]``.

Counts the variables and parameters of packages and tests whose whole name is one of WORDS, and the
modules that have such a name. Exits with 1 when a package's share exceeds ``--max``.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("platform/zerolab", "trials/zerotrial", "server/zeroserver", "tests")
WORDS = frozenset(
    [
        "told",
        "found",
        "made",
        "given",
        "left",
        "own",
        "wanted",
        "one",
        "each",
        "others",
        "late",
        "meant",
        "noted",
        "place",
        "here",
        "there",
        "known",
        "asked",
        "said",
        "words",
        "held",
        "kept",
        "wish",
        "why",
        "where",
        "alone",
        "mine",
        "theirs",
        "ours",
        "rest",
        "taken",
        "reached",
        "gone",
        "whole",
        "absent",
        "nothing",
        "beside",
        "around",
        "of_run",
        "for_runs",
        "desk",
        "ground",
        "wires",
        "shelves",
        "seams",
        "attendance",
        "lent",
    ]
)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each variable that is assigned and of each parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def check(package: str, *, verbose: bool) -> float:
    """Print the share of one package in percent, and return it."""
    total = 0
    vague: Counter[str] = Counter()
    modules = []
    for path in sorted((ROOT / package).rglob("*.py")):
        file = path.relative_to(ROOT)
        if path.stem in WORDS:
            modules.append(str(file))
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            if name in WORDS:
                vague[name] += 1
                if verbose:
                    print(f"{file}:{line}: {name}")
    share = 100 * vague.total() / max(1, total)
    print(f"{package}: {share:.1f} % of {total} names; {dict(vague.most_common(12))}")
    if modules:
        print(f"  modules: {', '.join(modules)}")
    return share


def main() -> int:
    """Check all packages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max", type=float, metavar="PERCENT", help="largest share allowed")
    parser.add_argument("-v", "--verbose", action="store_true", help="list each vague name")
    options = parser.parse_args()
    worst = max(check(package, verbose=options.verbose) for package in PACKAGES)
    if options.max is not None and worst > options.max:
        print(f"identifiers: {worst:.1f} % are vague; at most {options.max} % may be. See -v.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
