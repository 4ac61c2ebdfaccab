"""Floating-point operations of a model, and the peak of a device.

Counted by torch's ``FlopCounterMode``, which covers matrix products, convolutions and attention;
elementwise operations are not counted, as usual. A multiply-add is two operations.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from torch.utils.hooks import RemovableHandle

from zerolab.errors import ConfigError

PEAK_VARIABLE = "ZEROLAB_PEAK_TFLOPS"
"""Environment variable with the peak of one device in TFLOP/s; overrides the table."""

# Dense peaks from the vendors' data sheets, TFLOP/s: 16-bit, fp32 (TF32 is off by default).
_PEAKS: dict[str, tuple[float, float]] = {
    "B200": (2250, 75),
    "GH200": (989, 67),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "A10": (125, 31.2),
    "A40": (150, 37.4),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "T4": (65, 8.1),
    "V100": (125, 15.7),
    "RTX 4090": (165, 82.6),
    "RTX 3090": (71, 35.6),
    "MI300X": (1307, 163),
    "MI250X": (383, 96),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a device.

    Args:
        device: A GPU; a CPU has no known peak unless :data:`PEAK_VARIABLE` is set.
        dtype: Type of the matrix products.

    Returns:
        Operations per second, or None if unknown.

    Raises:
        ConfigError: If the environment variable is not a positive number.
    """
    if stated := os.environ.get(PEAK_VARIABLE):
        try:
            peak = float(stated)
        except ValueError:
            peak = 0.0
        if peak <= 0:
            problem = f"{PEAK_VARIABLE}: must be a positive number of TFLOP/s, got {stated!r}"
            raise ConfigError("environment", [problem])
        return peak * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for model, (half, single) in _PEAKS.items():
        if model in name:
            return (half if dtype in (torch.bfloat16, torch.float16) else single) * 1e12
    return None


def counter() -> FlopCounterMode:
    """Return a counter that also covers attention on CPU."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention,  # noqa: SLF001 - an operator's name
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,  # noqa: SLF001
        },
    )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the operations of attention from shapes."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    count = sdpa_backward_flop_count(gradient, query, key, value)  # type: ignore[no-untyped-call]
    return int(count)


@contextmanager
def count_flops() -> Iterator[Callable[[], int]]:
    """Count the operations of the block.

    Yields:
        A function that returns the number so far.
    """
    with counter() as mode:
        yield mode.get_total_flops


@dataclass(frozen=True)
class ModuleCost:
    """Cost of one module in one forward pass, with its submodules."""

    name: str
    kind: str
    parameters: int
    """Number of elements."""
    flops: int
    seconds: float
    """Seconds on the host; a GPU is synchronized around each module."""

    @property
    def depth(self) -> int:
        """0 for the root."""
        return self.name.count(".") + 1 if self.name else 0


class ForwardProfile:
    """Counter and timer of every module of one forward pass.

    Args:
        module: Root module.
        numels: Elements of the full parameters by name; at stage 3 the module has only shards.
    """

    def __init__(self, module: nn.Module, numels: dict[str, int]) -> None:
        self._module = module
        self._numels = numels
        self._mode = counter()
        self._seconds: dict[str, float] = {}
        self._began: dict[str, list[float]] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ForwardProfile:
        for name, child in self._module.named_modules():
            self._handles.append(child.register_forward_pre_hook(self._enter(name)))
            self._handles.append(child.register_forward_hook(self._leave(name)))
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def flops(self) -> int:
        """Number of operations of the entire pass."""
        return self._mode.get_total_flops()

    def costs(self) -> list[ModuleCost]:
        """Return one entry for each module that ran, in the order of the module tree."""
        # The counter names modules by the root's class, then the path.
        root = type(self._module).__name__
        counted = {
            name: sum(by_op.values()) for name, by_op in self._mode.get_flop_counts().items()
        }
        costs = []
        for name, child in self._module.named_modules():
            if name not in self._seconds:
                continue
            inside = f"{name}." if name else ""
            costs.append(
                ModuleCost(
                    name=name,
                    kind=type(child).__name__.removeprefix("FSDP"),
                    parameters=sum(n for p, n in self._numels.items() if p.startswith(inside)),
                    flops=counted.get(f"{root}.{name}" if name else "Global", 0),
                    seconds=self._seconds[name],
                )
            )
        return costs

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._began.setdefault(name, []).append(_now())

        return hook

    def _leave(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self._began.get(name):
                spent = _now() - self._began[name].pop()
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

        return hook


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def format_profile(
    costs: Sequence[ModuleCost],
    *,
    title: str,
    module_depth: int,
    top_modules: int,
    detailed: bool,
) -> str:
    """Return the profile as a table.

    Args:
        costs: Result of :meth:`ForwardProfile.costs`.
        title: First line.
        module_depth: Depth below which modules are omitted; -1 for none.
        top_modules: Number of modules per depth in the summary, the costliest first.
        detailed: Whether the full module tree follows the summary.

    Returns:
        Text of several lines.
    """
    deepest = max((cost.depth for cost in costs), default=0)
    limit = deepest if module_depth < 0 else min(module_depth, deepest)
    lines = [title, "", f"costliest modules at each depth (top {top_modules}):"]
    for depth in range(limit + 1):
        level = [cost for cost in costs if cost.depth == depth]
        level.sort(key=lambda cost: (-cost.flops, -cost.parameters, cost.name))
        lines += [f"  depth {depth}: {_short(cost)}" for cost in level[:top_modules]]
    if detailed:
        total = max((cost.flops for cost in costs), default=0)
        rows = [("module", "parameters", "forward", "share", "ms")]
        rows += [_row(cost, total) for cost in costs if cost.depth <= limit]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines.append("")
        for first, *columns in rows:
            cells = [text.rjust(width) for text, width in zip(columns, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def _short(cost: ModuleCost) -> str:
    name = cost.name or "(model)"
    return (
        f"{name} ({cost.kind}): {cost.parameters:,} parameters, {in_units(cost.flops)}FLOP, "
        f"{cost.seconds * 1e3:.2f} ms"
    )


def _row(cost: ModuleCost, total: int) -> tuple[str, str, str, str, str]:
    return (
        f"{'  ' * cost.depth}{cost.name or '(model)'} ({cost.kind})",
        f"{cost.parameters:,}",
        f"{in_units(cost.flops)}FLOP",
        f"{cost.flops / total:.1%}" if total else "-",
        f"{cost.seconds * 1e3:.2f}",
    )


def in_units(number: float) -> str:
    """Return a number with three digits and a prefix, such as ``12.3 G``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.4g} P"
