import json
import re
from pathlib import Path

import pytest
import yaml

from zerolab.config import load_engine_config, load_experiment
from zerolab.config.describe import TABLES, rows, with_tables
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.schema.hints import hints_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("ds_config.md", "experiment_config.md")


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_schema(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m zerolab.config.describe docs"


def test_every_table_stands_in_a_page() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
    assert set(re.findall(r"<!-- (\w[\w ]*) -->", text)) == {*TABLES, "end"}


def test_every_key_that_is_not_a_hint_is_read_by_a_program() -> None:
    roots = ("trials/zerotrial", "server/zeroserver", "platform/zerolab/agent")
    files = [file for root in roots for file in (DOCS.parent / root).rglob("*.py")]
    files.append(DOCS.parent / "platform/zerolab/config/experiment/for_runs.py")
    words = set(re.findall(r"\w+", "".join(file.read_text(encoding="utf-8") for file in files)))
    unread = []
    for section, model in ((EngineConfig, "DeepSpeed"), (ExperimentConfig, "Determined")):
        keys = {key for key, *_ in rows(section, model)} - set(hints_of(section))
        unread += [key for key in keys if re.split(r"\W", key)[-1] not in words]
    # The searcher's own fields are read where searchers are made.
    assert [key for key in unread if not key.startswith("searcher.")] == []


def test_the_examples_of_the_pages_are_valid() -> None:
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    (engine,) = re.findall(r"```json\n(.*?)```", pages["ds_config.md"], re.DOTALL)
    assert load_engine_config(json.loads(engine)).batch_sizes(4).micro == 8
    (experiment,) = re.findall(r"```yaml\n(.*?)```", pages["experiment_config.md"], re.DOTALL)
    assert load_experiment(yaml.safe_load(experiment)).searcher.max_trials == 8
