import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from pydantic.fields import FieldInfo

from tools.key_tables import PAGES, TABLES, with_tables
from zerolab.config import load_engine_config, load_experiment
from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.experiment.experiment_config import ExperimentConfig
from zerolab.schema.section import HINT, Section, choices_of, section_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


_ALL = pytest.mark.needs_extension("tpe_asha", "pbt", "custom", "s3")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "reference/ds_config.md", marks=pytest.mark.needs_extension("deepspeed_config")
        ),
        pytest.param("reference/experiment_config.md", marks=_ALL),
        pytest.param("migrate/from_determined.md", marks=pytest.mark.needs_extension("determined")),
    ],
)
def test_doc_tables_match_schema(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m tools.key_tables docs"


def test_doc_pages_have_all_tables() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in PAGES)
    assert set(re.findall(r"<!-- (\w[\w ]*) -->", text)) == {*TABLES, "end"}


@pytest.mark.needs_extension("stage", "deepspeed_api")
def test_fields_are_used_unless_hints() -> None:
    read = attributes_read()
    assert {"train_batch_size", "max_restarts"} <= read
    unread = [
        f"{section.__name__}.{name}"
        for section in sections_in(EngineConfig) | sections_in(ExperimentConfig)
        for name, field in section.model_fields.items()
        if name not in read and not is_hint(field) and not holds_only_hints(field)
    ]
    assert unread == []


def attributes_read() -> set[str]:
    """Return each ``x`` in expressions ``something.x`` of programs, without tests."""
    return {
        node.attr
        for package in ("trials", "server/zeroserver", "platform")
        for file in (DOCS.parent / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def sections_in(section: type[Section]) -> set[type[Section]]:
    """Return a section and all sections inside it, including alternatives."""
    result = {section}
    for field in section.model_fields.values():
        inner = [section_of(field.annotation), *choices_of(field).values()]
        for inner_section in inner:
            result |= sections_in(inner_section) if inner_section is not None else set()
    return result


def is_hint(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and HINT in extra


def holds_only_hints(field: FieldInfo) -> bool:
    """Return whether a field is a section whose keys all have no effect."""
    inner = section_of(field.annotation)
    return inner is not None and all(
        is_hint(inner_section) or holds_only_hints(inner_section)
        for inner_section in inner.model_fields.values()
    )


@pytest.mark.needs_extension("s3")
def test_doc_examples_are_valid() -> None:
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in PAGES}
    (engine,) = re.findall(r"```json\n(.*?)```", pages["reference/ds_config.md"], re.DOTALL)
    assert load_engine_config(json.loads(engine)).batch_sizes(4).micro == 8
    result = re.findall(r"```yaml\n(.*?)```", pages["reference/experiment_config.md"], re.DOTALL)
    experiment, *parts = [yaml.safe_load(text) for text in result]
    assert load_experiment(experiment).searcher.max_trials == 8
    for part in parts:
        part.pop("extends", None)  # a file that the page does not show
        needs_optuna = part.get("searcher", {}).get("name") == "optuna"
        if not needs_optuna or find_spec("optuna") is not None:
            load_experiment(experiment | part)
