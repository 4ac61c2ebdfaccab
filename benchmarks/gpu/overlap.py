"""Share of stage 3's communication and copies that overlaps computation, from a profile.

One step is traced by torch's profiler. Collectives are kernels of NCCL; copies are transfers
between host and GPU. ``hidden`` is the share of their time during which a computing kernel runs as
well. With one rank the gathers are copies inside the GPU, so the plan with parameters in host
memory shows more: there every block travels over the bus before it is needed. On a CPU nothing is
asynchronous: the rehearsal shows that a step can be traced.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import Cases, device_of, parse_step, synchronize
from benchmarks.training.gpt import GPT, SIZES, batches
from zerotrial import initialize

PLANS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3},
    "stage 3, parameters on host": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
    "stage 2, optimizer on host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
Interval = tuple[float, float]


def main() -> None:
    options, cases = parse_step(__doc__)
    for plan, zero in PLANS.items():
        try:
            trace(plan, zero, device_of(options), options, cases)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            cases.add_error(plan, error)


def trace(
    plan: str,
    zero: dict[str, Any],
    device: torch.device,
    options: argparse.Namespace,
    cases: Cases,
) -> None:
    """Train four steps, trace the last and report where its time goes."""
    size = SIZES["1m" if options.rehearse else "350m"]
    torch.manual_seed(0)
    with device:
        model = GPT(size)
    config = {
        "train_micro_batch_size_per_gpu": size.micro or 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
    }
    engine = initialize(model=model, config=config, device=device)[0]
    data = batches(size.micro or 2, size.sequence, 0)
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    for step in range(4):
        batch = next(data).to(device)
        if step < 3:
            engine.backward(engine(batch))
            engine.step()
            continue
        synchronize(device)
        with profile(activities=[kind]) as profiler:
            engine.backward(engine(batch))
            engine.step()
            synchronize(device)
    engine.close()
    results = profiler.profiler and profiler.profiler.kineto_results
    events = [
        (event.name(), event.start_ns() / 1e6, event.end_ns() / 1e6)
        for event in (results.events() if results else ())
        if event.device_type().name.lower() == device.type and not event.is_user_annotation()
    ]
    compute, collectives, copies, moves = (union(part) for part in split(events))
    begin = min((start for _, start, _ in events), default=0.0)
    end = max((stop for _, _, stop in events), default=0.0)
    cases.add(
        plan,
        ok=bool(events),
        step_ms=end - begin,
        compute_ms=length(compute),
        collective_ms=length(collectives),
        collective_hidden=share_inside(collectives, compute),
        copy_ms=length(copies),
        copy_hidden=share_inside(copies, compute),
        device_copy_ms=length(moves),
        device_copy_hidden=share_inside(moves, compute),
        idle_ms=(end - begin) - length(union([*compute, *collectives, *copies, *moves])),
    )


def split(events: Iterable[tuple[str, float, float]]) -> list[list[Interval]]:
    """Return the times of computing, of NCCL, of copies to and from the host, and inside the GPU.

    In a world of one, NCCL gathers by a copy inside the GPU.
    """
    parts: list[list[Interval]] = [[], [], [], []]
    for name, start, stop in events:
        if "nccl" in name:
            kind = 1
        elif "HtoD" in name or "DtoH" in name:
            kind = 2
        elif "DtoD" in name:
            kind = 3
        else:
            kind = 0
        parts[kind].append((start, stop))
    return parts


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)


def share_inside(inner: list[Interval], outer: list[Interval]) -> float | None:
    """Return the share of ``inner`` that lies within ``outer``; None if ``inner`` is empty."""
    total = length(inner)
    if not total:
        return None
    return (total + length(outer) - length(union([*inner, *outer]))) / total


if __name__ == "__main__":
    main()
