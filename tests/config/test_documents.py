import json
import re
from pathlib import Path

import pytest
import yaml

from zerolab.config import load_engine_config, load_experiment
from zerolab.config.describe import TABLES, with_tables

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("ds_config.md", "experiment_config.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_schema(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m zerolab.config.describe docs"


def test_every_table_stands_in_a_page() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
    assert set(re.findall(r"<!-- (\w[\w ]*) -->", text)) == {*TABLES, "end"}


def test_the_examples_of_the_pages_are_valid() -> None:
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    (engine,) = re.findall(r"```json\n(.*?)```", pages["ds_config.md"], re.DOTALL)
    assert load_engine_config(json.loads(engine)).batch_sizes(4).micro == 8
    (experiment,) = re.findall(r"```yaml\n(.*?)```", pages["experiment_config.md"], re.DOTALL)
    assert load_experiment(yaml.safe_load(experiment)).searcher.max_trials == 8
