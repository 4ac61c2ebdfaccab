"""Slots are GPUs or cores; the threads of all ranks fit the cores."""

import pytest

from zerolab.agent.run import run_environment
from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError
from zerolab.launcher.devices import find_slots
from zerolab.linux import usable_cores

CPUS = [SlotInfo(index, "cpu") for index in range(4)]
GPUS = [SlotInfo(index, f"cuda:{index} NVIDIA H100") for index in range(4)]


def test_cpu_slots_are_cores_or_count() -> None:
    assert find_slots(cpu=True) == [SlotInfo(i, "cpu") for i in range(usable_cores())]
    assert find_slots(200, cpu=True)[-1] == SlotInfo(199, "cpu")


def test_slot_count_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        find_slots(0)


def test_threads_of_slots_fit_cores() -> None:
    for count in (1, 2, 4):
        threads = int(run_environment(CPUS[:count], [0])["OMP_NUM_THREADS"])
        assert threads == max(1, usable_cores() // count)


def test_run_sees_its_gpus_only() -> None:
    environment = run_environment(GPUS, [1, 3])
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert run_environment(CPUS, [1])["CUDA_VISIBLE_DEVICES"] == ""
