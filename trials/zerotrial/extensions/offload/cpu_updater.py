"""Optimizer states and master weights in host memory, for a model on another device.

S is the number of elements in a bucket's shard. A thread updates bucket i while a separate stream
transfers the gradient of bucket i+1 and the weights of bucket i-1.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerotrial.engine.protocols import UpdaterInputs
from zerotrial.engine.update.in_memory import build_updater

__all__ = ["CpuUpdater"]


@dataclass
class _Transfer:
    """Host memory of one bucket."""

    gradient: Tensor
    """(S,), type of the gradients."""

    weights: Tensor
    """(S,), type of the model's weights."""


class CpuUpdater:
    """Updater on the CPU that wraps the in-memory updater, see the protocol ``Updater``.

    The wrapped one has the states: methods that are not here are its own.
    """

    def __init__(self, inputs: UpdaterInputs) -> None:
        options = inputs.config.zero_optimization.offload_optimizer
        on_gpu = inputs.device.type == "cuda"
        # Only the transfer buffers are pinned: torch rounds pinned memory up to powers of two.
        self._pin = options.pin_memory and on_gpu
        # Masters already in host memory were made for this updater: no copy needed.
        masters = [master.to("cpu", copy=not on_gpu) for master in inputs.masters]
        self._inner = build_updater(replace(inputs, masters=masters, device=torch.device("cpu")))
        self.optimizer = self._inner.optimizer
        self._stream: Any = None
        if on_gpu:
            self._stream = torch.cuda.Stream(inputs.device)  # type: ignore[no-untyped-call]
        self._worker = ThreadPoolExecutor(1, "offload-update")
        if on_gpu:  # a new thread starts with the first GPU as its current device
            self._worker.submit(torch.cuda.set_device, self._stream.device).result()
        self._transfers: dict[int, _Transfer] = {}
        self._running: list[Future[bool]] = []
        self._unpublished: list[tuple[_Transfer, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, index: int, gradient: Tensor, scale: float, publish: Tensor) -> bool:
        """Update one bucket's shard."""
        transfer = self._transfers.get(index)
        if transfer is None:
            transfer = _Transfer(
                self._host_like(gradient, gradient.dtype), self._host_like(publish, publish.dtype)
            )
            self._transfers[index] = transfer
        copied: Any = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            gradient.record_stream(self._stream)
        with self._on_stream():
            transfer.gradient.copy_(gradient, non_blocking=True)
            if self._stream is not None:
                copied = self._stream.record_event()
        job = self._worker.submit(self._update, index, transfer, copied, scale, publish)
        self._running.append(job)
        return False

    def _update(
        self, index: int, transfer: _Transfer, copied: Any, scale: float, publish: Tensor
    ) -> bool:
        if copied is not None:
            copied.synchronize()
        done = self._inner.step(index, transfer.gradient, scale, transfer.weights)
        if done:
            with self._on_stream():
                publish.copy_(transfer.weights, non_blocking=True)
        else:
            self._unpublished.append((transfer, publish))
        return done

    def finish(self) -> None:
        """End the step: all published weights are written when this returns."""
        running, self._running = self._running, []
        for job in running:
            job.result()
        self._inner.finish()
        with self._on_stream():
            for transfer, publish in self._unpublished:
                publish.copy_(transfer.weights, non_blocking=True)
        self._unpublished.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def tensors_by_kind(self) -> dict[str, list[Tensor]]:
        """Return tensors by kind; ``buckets`` are those in transfer."""
        buckets = [t for pair in self._transfers.values() for t in (pair.gradient, pair.weights)]
        inner = self._inner.tensors_by_kind()
        return {**inner, "buckets": inner.get("buckets", []) + buckets}

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown()
        self._inner.close()

    def _host_like(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=self._pin)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
