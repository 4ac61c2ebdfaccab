"""Row structs match the tables."""

import pytest

from zeroserver.store.rows import (
    AgentRow,
    CheckpointRow,
    ExperimentRow,
    NodeRow,
    Row,
    RunRow,
    TrialRow,
)


@pytest.mark.parametrize(
    "kind", [AgentRow, CheckpointRow, ExperimentRow, NodeRow, RunRow, TrialRow]
)
def test_fields_equal_columns(kind: type[Row]) -> None:
    assert kind.__struct_fields__ == tuple(column.name for column in kind.table.columns)
