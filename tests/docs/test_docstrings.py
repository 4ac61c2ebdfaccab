"""Docstrings of public items are complete, and their examples run."""

import doctest
import importlib.util
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import zerolab
import zerotrial
from tests.docs import example_server
from tests.docs.public_items import Item, docstring_problems, public_items
from zeroserver.access.routes import ACCESS

ITEMS = list(public_items())
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = {"torch": torch, "zerolab": zerolab, "zerotrial": zerotrial}
"""Modules that examples use without an import."""
example = doctest.DocTestParser().get_examples(zerotrial.Trainer.__doc__)[0].source
exec(example, NAMES)
CLIENT = [
    item
    for item in ITEMS
    if item.name.startswith(("zerolab.Client", "zerolab.client.search", "zerolab.client.objects"))
]


def run_example(item: Item) -> str:
    """Run the examples of a docstring; return the report of failures."""
    report: list[str] = []
    test = doctest.DocTestParser().get_doctest(item.doc, dict(NAMES), item.name, None, 0)
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    for value in test.globs.values():
        if isinstance(value, zerolab.Client):
            value.close()
    return "".join(report)


def can_run(item: Item) -> bool:
    """Return whether the optional library of an example such as ``to_polars`` is installed."""
    library = {"to_arrow": "pyarrow", "to_polars": "polars", "to_pandas": "pandas"}
    name = library.get(item.name.rpartition(".")[2])
    return name is None or importlib.util.find_spec(name) is not None


def test_docstrings_are_complete() -> None:
    problems = {item.name: problems for item in ITEMS if (problems := docstring_problems(item))}
    assert problems == {}


def test_import_zerolab_offers_its_modules() -> None:
    code = "import sys, zerolab; print(len([m for m in sys.modules if m.startswith('zerolab')])); "
    code += "print(zerolab.core.init and zerolab.config.load_experiment and zerolab.errors.one_line"
    code += " and zerolab.searcher.make_searcher and 'all')"
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["1", "all"]


@pytest.mark.parametrize(
    "item",
    [item for item in ITEMS if ">>>" in item.doc and item not in CLIENT],
    ids=lambda item: item.name,
)
def test_example_runs(item: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_run(item):
        pytest.skip("the library is not installed")
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(ACCESS):  # an example declares a route
        report = run_example(item)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert not report


@pytest.mark.slow
@pytest.mark.processes
def test_client_examples_run(tmp_path: Path) -> None:
    with example_server.running(tmp_path):
        reports = [run_example(item) for item in CLIENT if can_run(item)]
    text = "".join(reports)
    assert not text, text
