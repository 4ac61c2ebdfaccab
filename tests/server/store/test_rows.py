"""Row structs match the tables."""

import pytest

from zeroserver.store.rows import (
    AgentRow,
    CheckpointRow,
    ExperimentRow,
    LogRow,
    ModelRow,
    NodeRow,
    Row,
    RunRow,
    SearcherEventRow,
    TrialRow,
)


@pytest.mark.parametrize(
    "kind",
    [
        AgentRow,
        CheckpointRow,
        ExperimentRow,
        LogRow,
        ModelRow,
        NodeRow,
        RunRow,
        SearcherEventRow,
        TrialRow,
    ],
)
def test_fields_equal_columns(kind: type[Row]) -> None:
    assert kind.__struct_fields__ == tuple(column.name for column in kind.table.columns)
