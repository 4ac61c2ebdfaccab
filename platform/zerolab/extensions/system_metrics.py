"""Measurements of a machine: system metrics of a run, and the load of an agent's slots."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from zerolab.contract.messages import AgentLoad, SlotInfo, SlotLoad

__all__ = ["LoadMeter", "SystemMetrics"]

logger = logging.getLogger(__name__)

_START_ROUNDING_S = 2.0
"""Start times of processes count in clock ticks since boot, whose time is rounded."""


class SystemMetrics:
    """Samples this machine in a thread, once a second; returns means.

    Args:
        every_s: Seconds over which the means are taken; the first ones follow the first sample.
        sample_s: Seconds between samples.
    """

    def __init__(self, *, every_s: float = 10.0, sample_s: float = 1.0) -> None:
        self._every_s = every_s
        self._sample_s = sample_s
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}
        self._taken_at: float | None = None
        self._stop = threading.Event()
        self._gpus = _open_gpus()
        self._thread = threading.Thread(target=self._run, name="zerolab-system", daemon=True)
        self._thread.start()

    def take(self, *, now: bool = False) -> dict[str, float] | None:
        """Return the means since the last call once ``every_s`` have passed, else ``None``.

        Args:
            now: Return them without waiting.
        """
        if (
            not now
            and self._taken_at is not None
            and time.monotonic() - self._taken_at < self._every_s
        ):
            return None
        with self._lock:
            sums, self._sums = self._sums, {}
        if not sums:
            return None
        self._taken_at = time.monotonic()
        return {name: total / count for name, (total, count) in sums.items()}

    @property
    def sampled(self) -> bool:
        """Whether samples are available."""
        with self._lock:
            return bool(self._sums)

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call only sets the reference
        before, at = _counters(), time.monotonic()
        while not self._stop.wait(self._sample_s):
            try:
                after, now = _counters(), time.monotonic()
                sample = _host() | _rates(before, after, now - at) | _gpu_sample(self._gpus)
                before, at = after, now
            except Exception as error:  # noqa: BLE001 - a failing sensor must not stop the training
                logger.warning("system metrics are no longer reported: %s", error)
                return
            with self._lock:
                for name, value in sample.items():
                    total, count = self._sums.get(name, (0.0, 0))
                    self._sums[name] = (total + value, count + 1)


class LoadMeter:
    """Measures the load of an agent's machine and of its slots.

    Args:
        directory: Directory of the agent, on the disk that is measured.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gpus = _open_gpus()
        self._at = time.time()
        """Time of the last measurement, to compare with start times of processes."""
        self._steady = time.monotonic()
        """The same time on a clock that is never set."""
        self._cpu_s: dict[psutil.Process, float] = {}
        psutil.cpu_percent()  # the first call only sets the reference

    def measure(self, slots: Sequence[SlotInfo], ranks: Mapping[int, Sequence[int]]) -> AgentLoad:
        """Measure the time since the last call.

        Args:
            slots: Slots of the agent; those of a cluster's other nodes are not measured.
            ranks: Slots of each rank by the id of its process; a rank counts with its descendants,
                in equal shares to each of its slots.
        """
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._directory))
        uses = self._uses(ranks)
        local = [slot for slot in slots if slot.node is None]
        loads = [self._slot_load(slot, uses.get(slot.id)) for slot in local]
        return AgentLoad(
            cpu_percent=psutil.cpu_percent(),
            cores=psutil.cpu_count() or 1,
            memory_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_bytes=disk.used,
            disk_total_bytes=disk.total,
            slots=[load for load in loads if load != SlotLoad(load.id)],
        )

    def _uses(self, ranks: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        """Return CPU percent and resident memory of each slot in which processes run."""
        now, steady, before = time.time(), time.monotonic(), self._cpu_s
        seconds = max(steady - self._steady, 1e-3)
        self._cpu_s = {}
        uses: dict[int, tuple[float, int]] = {}
        for pid, tree in _process_trees(ranks).items():
            used_s, resident = 0.0, 0
            for process in tree:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    total_s = self._cpu_s[process] = times.user + times.system
                    is_new = process.create_time() > self._at - _START_ROUNDING_S
                    used_s += max(0.0, total_s - before.get(process, 0.0 if is_new else total_s))
                    resident += process.memory_info().rss
            for slot in ranks[pid]:
                percent, memory = uses.get(slot, (0.0, 0))
                share = len(ranks[pid])
                uses[slot] = percent + 100 * used_s / seconds / share, memory + resident // share
        self._at, self._steady = now, steady
        return uses

    def _slot_load(self, slot: SlotInfo, use: tuple[float, int] | None) -> SlotLoad:
        gpu: dict[str, float] = {}
        if slot.device.startswith("cuda") and slot.id < len(self._gpus):
            gpu = _read_gpu(self._gpus[slot.id])
        percent, memory = (round(use[0], 1), use[1]) if use else (None, None)
        used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
        return SlotLoad(
            slot.id,
            cpu_percent=percent,
            memory_bytes=memory,
            gpu_percent=gpu.get("percent"),
            gpu_memory_bytes=None if used is None else int(used),
            gpu_memory_total_bytes=None if total is None else int(total),
        )


def _process_trees(roots: Mapping[int, object]) -> dict[int, list[psutil.Process]]:
    """Return the running processes with these ids, each with its descendants."""
    if not roots:
        return {}
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children[process.ppid()].append(process)
            processes[process.pid] = process
    trees = {pid: [processes[pid]] for pid in roots if pid in processes}
    for tree in trees.values():
        for process in tree:  # grows while it is read
            tree.extend(children[process.pid])
    return trees


def _host() -> dict[str, float]:
    memory, process = psutil.virtual_memory(), psutil.Process().memory_info()
    return {
        "cpu_percent": psutil.cpu_percent(),
        "memory_used_bytes": float(memory.total - memory.available),
        "memory_percent": memory.percent,
        "process_memory_bytes": float(process.rss),
        "disk_used_percent": psutil.disk_usage("/").percent,
    }


def _counters() -> dict[str, int]:
    counters: dict[str, int] = {}
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    if disk is not None:
        counters |= {"disk_read": disk.read_bytes, "disk_write": disk.write_bytes}
    if network is not None:
        counters |= {"network_sent": network.bytes_sent, "network_received": network.bytes_recv}
    return counters


def _rates(before: dict[str, int], after: dict[str, int], seconds: float) -> dict[str, float]:
    return {
        f"{name}_bytes_per_second": max(0, after[name] - before[name]) / max(seconds, 1e-9)
        for name in after
        if name in before
    }


def _open_gpus() -> list[Any]:
    """Return handles of this machine's NVIDIA GPUs; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception as error:  # noqa: BLE001 - no driver, no library, no permission: no GPU metrics
        logger.debug("no GPU metrics: %s", error)
        return []


def _gpu_sample(gpus: list[Any]) -> dict[str, float]:
    return {
        f"gpu{index}_{name}": value
        for index, gpu in enumerate(gpus)
        for name, value in _read_gpu(gpu).items()
        if name != "memory_total_bytes"
    }


def _read_gpu(gpu: Any) -> dict[str, float]:
    """Return the measurements that a GPU offers."""
    import pynvml

    sample: dict[str, float] = {}
    for names, read in (
        (("memory_used_bytes", "memory_total_bytes"), _gpu_memory),
        (("percent",), lambda handle: (pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,)),
        (("power_watts",), lambda handle: (pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,)),
    ):
        try:
            sample |= dict(zip(names, map(float, read(gpu)), strict=True))
        except pynvml.NVMLError:  # virtual GPUs hide some; others have no dedicated memory
            continue
    return sample


def _gpu_memory(gpu: Any) -> tuple[float, float]:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
    return memory.used, memory.total
