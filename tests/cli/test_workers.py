"""Slots of a task, from options and variables of a platform."""

import pytest

from zerolab.errors import ConfigError
from zerolab.extensions.commands.task import count_slots, worker_specification


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ('{"count": 2, "gpus": 1}', (2, 1)),
        ('{"worker": {"count": 2, "gpus": 4}}', (8, 4)),
        ('{"worker": {"gpus": 4}}', (4, 4)),
        ('{"count": 3}', (3, 1)),
        ("", (1, 1)),
        ('{"framework": "pytorch", "worker": {"count": 2, "gpus": 1}}', (2, 1)),
        ('{"framework": "pytorch", "name": "job", "worker": {"count": 3, "gpus": 0}}', (3, 1)),
        ('{"name": "job", "count": 2, "gpus": 0}', (2, 1)),
        ('{"worker": {"name": "w", "count": 2, "gpus": 2}}', (4, 2)),
    ],
)
def test_workers_to_slots(text: str, slots: tuple[int, int]) -> None:
    assert count_slots(None, text) == slots


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "must look like"),
        ("{", "must look like"),
        ('{"count": 0}', "count must be at least 1"),
        ('{"count": true}', "count must be at least 1"),
        ('{"count": "2"}', "count must be at least 1"),
        ('{"worker": {"count": 2}, "chief": {"count": 1}}', "its only role, got chief too"),
        ('{"worker": 2}', "must look like"),
        ('{"count": 1, "gpus": -1}', "gpus at least 0"),
        ('{"framework": "pytorch", "ps": {"count": 1}, "worker": {}}', "got ps too"),
    ],
)
def test_invalid_workers_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        count_slots(None, text)
    assert message in str(refused.value)


def test_worker_variable_of_platform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DC_DL_CONFIG", "ALL_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    assert worker_specification(None, "", None) == ""
    monkeypatch.setenv("ALL_WORKERS", "host-0,host-1")  # in a job of such a platform
    assert worker_specification(None, "", None) == ""
    assert worker_specification(None, "", "ALL_WORKERS") == "host-0,host-1"
    monkeypatch.setenv("ALL_WORKERS", '{"count": 2}')
    assert worker_specification(None, "", None) == '{"count": 2}'
    monkeypatch.setenv("DC_DL_CONFIG", '{"worker": {"count": 3}}')
    assert worker_specification(None, "", None) == '{"worker": {"count": 3}}'
    monkeypatch.setenv("MY_JOB", "mine")
    assert worker_specification(2, "", None) == ""  # consistent with the environment
    assert worker_specification(None, "said", None) == "said"
    assert worker_specification(None, "", "MY_JOB") == "mine"
    monkeypatch.setenv("MY_JOB", "")
    with pytest.raises(ConfigError) as refused:
        worker_specification(2, "", "MY_JOB")
    assert refused.value.problems == [
        "--worker-from: cannot be combined with --worker or --slots",
        "--worker-from: the variable MY_JOB must be set, and not empty",
    ]
