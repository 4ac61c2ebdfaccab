"""Slots are GPUs or cores; the threads of all ranks fit the cores."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.trial.loop.test_metrics import Gpus
from tests.waiting import until
from zerolab.agent.run import run_environment
from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError
from zerolab.extensions.system_metrics import LoadMeter
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


def test_load_of_slots_counts_process_trees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank counts with its child, in equal shares to its slots; GPUs count by themselves."""
    monkeypatch.setitem(sys.modules, "pynvml", Gpus())
    slots = [SlotInfo(0, "cuda:0 A"), SlotInfo(1, "cuda:1 A"), SlotInfo(2, "cuda:2 A", node=1)]
    started = time.time()
    meter = LoadMeter(tmp_path)
    spin = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    wait = "print(flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin + wait!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        load = meter.measure(slots, {rank.pid: [0, 1]})
        passed_s = time.time() - started
        quiet = meter.measure(slots, {rank.pid: [0, 1]})
        rank.communicate(b"\n")
    first, second = load.slots
    assert first.cpu_percent is not None
    assert 0.25 < first.cpu_percent / 100 * 2 * passed_s < 3.0  # seconds of CPU of both processes
    assert (first.cpu_percent, first.memory_bytes) == (second.cpu_percent, second.memory_bytes)
    assert (first.memory_bytes or 0) > 2_000_000
    assert (second.gpu_percent, second.gpu_memory_bytes) == (51, 11)
    assert second.gpu_memory_total_bytes == 80
    assert quiet.slots[0].memory_bytes is not None
    ended = meter.measure(slots, {rank.pid: [0, 1]}).slots
    assert [(slot.id, slot.memory_bytes, slot.gpu_percent) for slot in ended] == [
        (0, None, 50),
        (1, None, 51),
    ]


def test_load_is_right_when_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The share of a core is not divided by the difference of the times of day."""
    slots = [SlotInfo(0, "cpu")]
    meter = LoadMeter(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        meter.measure(slots, {rank.pid: [0]})
        used_s = psutil.Process(rank.pid).cpu_times().user
        until("uses the CPU", psutil.Process(rank.pid).cpu_times, lambda t: t.user > used_s + 0.3)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 3600)
        (load,) = meter.measure(slots, {rank.pid: [0]}).slots
        rank.kill()
    assert 0 < (load.cpu_percent or 0) < 1000


def test_run_sees_its_gpus_only() -> None:
    environment = run_environment(GPUS, [1, 3])
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert run_environment(CPUS, [1])["CUDA_VISIBLE_DEVICES"] == ""
