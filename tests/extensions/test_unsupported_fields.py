"""Experiment keys and searchers of other platforms, each with its replacement."""

import pytest

from tests.config.test_experiment_config import problems, with_values
from zerolab.extensions.config_checks.unsupported_fields import OTHER_SEARCHERS, UNSUPPORTED_FIELDS
from zerolab.searcher.registry import SEARCHERS


@pytest.mark.parametrize("field", sorted(UNSUPPORTED_FIELDS))
def test_unsupported_field_has_replacement(field: str) -> None:
    head, _, remaining = field.partition(".")
    content = with_values()
    content[head] = {**content.get(head, {}), remaining: ["on"]} if remaining else ["on"]
    lines = problems(content)
    assert f"{field}: is not supported; {UNSUPPORTED_FIELDS[field].instead}" in lines
    content[head] = {**content[head], remaining: None} if remaining else {}
    assert problems(content) == []


@pytest.mark.parametrize("name", sorted(OTHER_SEARCHERS))
def test_unsupported_searcher_is_one_error(name: str) -> None:
    searcher = {"name": name, "metric": "m", "max_trials": 3, "max_length": 10}
    searcher |= {"max_time": 100, "time_metric": "batches", "divisor": 4, "max_rungs": 3}
    (line,) = problems(with_values(searcher=searcher))
    assert line.startswith(f"searcher.name: must be one of {', '.join(SEARCHERS)}; {name} is a")
