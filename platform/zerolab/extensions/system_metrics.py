"""System metrics of a run's machines: CPU, memory, disk, network, GPUs."""

import logging
import threading
import time
from typing import Any

import psutil

__all__ = ["SystemMetrics"]

logger = logging.getLogger(__name__)


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
    if not gpus:
        return {}
    import pynvml

    sample: dict[str, float] = {}
    for index, gpu in enumerate(gpus):
        for name, read in (
            (
                "memory_used_bytes",
                lambda handle: float(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
            ),
            ("percent", lambda handle: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            ("power_watts", lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        ):
            try:
                sample[f"gpu{index}_{name}"] = read(gpu)
            except pynvml.NVMLError:  # virtual GPUs hide some; others have no dedicated memory
                continue
    return sample
