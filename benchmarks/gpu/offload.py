"""States in host memory: speed beside states on the GPU, and the largest model of the formula.

``speed``: stage 2 with offloaded optimizer states and stage 3 with offloaded parameters, as shares
of the same stage without offload.

``largest model``: the GPU's memory is capped, and the model grows block by block up to the largest
that ``zerotrial.engine.memory.estimate`` and measured activations allow. That one must train. One
that is 1.5 times as deep must run out of memory, or the formula asks for too much. Without a GPU
there is no cap: the rehearsal compares the held bytes with the formula instead.
"""

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.cases import Cases, device_of, parse_step, synchronize
from benchmarks.training.gpt import GPT, SIZES, Size, batches
from zerotrial import initialize
from zerotrial.extensions.planner.formulas import estimate

MARGIN = 0.92
"""Share of the cap that the formula may fill; the rest is lost to fragmentation."""

PLANS: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 2, optimizer on host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3": {"stage": 3},
    "stage 3, all on host": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}
CAPS_GIB = {"stage 2": 6.0, "stage 2, optimizer on host": 6.0, "stage 3, all on host": 3.0}
"""Largest models are sought under these caps, so that they are built and trained within seconds."""

WIDE = Size(width=2048, layers=1, heads=16, sequence=1024)
"""One block of the model that grows: 50 M parameters."""

MICRO = 2
"""Samples of a micro-batch of the model that grows."""


def main() -> None:
    options, cases = parse_step(__doc__)
    device = device_of(options)
    speed(device, options, cases)
    for plan, cap_gib in CAPS_GIB.items():
        try:
            if device.type == "cuda":
                largest(plan, int(cap_gib * 2**30), device, cases)
            else:
                held_bytes(plan, device, cases)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            cases.add_error(f"largest model {plan}", error)
        finally:
            release(device)


def speed(device: torch.device, options: argparse.Namespace, cases: Cases) -> None:
    """Report seconds of a step for every plan."""
    size = SIZES["1m" if options.rehearse else "350m"]
    micro, steps = (2, 3) if options.rehearse else (16, 6)
    base: dict[int, float] = {}
    for plan, zero in PLANS.items():
        try:
            seconds = train(size, micro, zero, device, steps)
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            cases.add_error(f"speed {plan}", error)
            continue
        finally:
            release(device)
        base.setdefault(zero["stage"], seconds)
        share = base[zero["stage"]] / seconds
        cases.add(
            f"speed {plan}", samples_per_s=micro / seconds, step_s=seconds, share_without=share
        )


def train(
    size: Size,
    micro: int,
    zero: dict[str, Any],
    device: torch.device,
    steps: int,
    *,
    fast: bool = False,
) -> float:
    """Train for some steps and return the median seconds of a step; the first two do not count.

    Args:
        size: Of the model.
        micro: Samples of a micro-batch.
        zero: The config's ``zero_optimization``.
        device: To train on.
        steps: That are timed.
        fast: Build a large model in host memory, without random numbers.
    """
    torch.manual_seed(0)
    if fast:
        with torch.device("meta"):
            model = GPT(size)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.01)
    else:
        with device:
            model = GPT(size)
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
    }
    engine = initialize(model=model, config=config, device=device)[0]
    del model
    data = batches(micro, size.sequence, 0)
    seconds = []
    try:
        for step in range(steps + 2):
            batch = next(data).to(device)
            synchronize(device)
            began = time.perf_counter()
            engine.backward(engine(batch))
            engine.step()
            synchronize(device)
            if step >= 2:
                seconds.append(time.perf_counter() - began)
    finally:
        engine.close()
    return statistics.median(seconds) if seconds else 0.0


def parameters_of(size: Size) -> tuple[int, int]:
    """Return the parameters of a model and of its largest block."""
    with torch.device("meta"):
        model = GPT(size)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    return sum(parameter.numel() for parameter in model.parameters()), block


def predicted_bytes(size: Size, zero: dict[str, Any]) -> int:
    """Return the formula's peak of the GPU, without activations."""
    numel, block = parameters_of(size)
    places = {
        key: zero[key]["device"] for key in ("offload_optimizer", "offload_param") if key in zero
    }
    return estimate(numel, block, 1, zero["stage"], **places).peak_device


def largest(plan: str, cap: int, device: torch.device, cases: Cases) -> None:
    """Find the deepest model that fits the cap by the formula, and train it and a deeper one."""
    zero = PLANS[plan]
    fixed, per_block = activation_bytes(plan, device)

    def formula(layers: int) -> int:
        return predicted_bytes(deep(layers), zero) + fixed + layers * per_block

    layers = 1
    while layers < 40 and formula(layers + 1) <= MARGIN * cap:  # the host's memory ends there
        layers += 1
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    try:
        measured = peak_bytes(deep(layers), zero, device)
        too_large = runs_out_of_memory(deep(layers * 3 // 2 + 1), zero, device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    cases.add(
        f"largest model {plan}",
        ok=too_large,
        cap_gib=cap / 2**30,
        layers=layers,
        parameters_m=parameters_of(deep(layers))[0] / 1e6,
        peak_to_formula=measured / formula(layers),
        deeper_runs_out=too_large,
    )


def deep(layers: int) -> Size:
    """Return the shape of the model that grows."""
    return dataclasses.replace(WIDE, layers=layers)


@functools.cache
def activation_bytes(plan: str, device: torch.device) -> tuple[int, int]:
    """Return the bytes beyond the formula: of the whole model, and of each block."""
    zero = PLANS[plan]
    two, three = (
        peak_bytes(deep(layers), zero, device) - predicted_bytes(deep(layers), zero)
        for layers in (2, 3)
    )
    per_block = max(0, three - two)
    return max(0, two - 2 * per_block), per_block


def peak_bytes(size: Size, zero: dict[str, Any], device: torch.device) -> int:
    """Train two steps and return the peak of allocated bytes on the GPU."""
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    train(size, MICRO, zero, device, 0, fast=True)
    return int(torch.cuda.max_memory_allocated(device))


def runs_out_of_memory(size: Size, zero: dict[str, Any], device: torch.device) -> bool:
    """Return True if training fails because the GPU's memory is full."""
    release(device)
    try:
        train(size, MICRO, zero, device, 0, fast=True)
    except torch.cuda.OutOfMemoryError:
        return True
    return False


def held_bytes(plan: str, device: torch.device, cases: Cases) -> None:
    """Compare what an engine holds on a CPU with the formula."""
    zero, size = PLANS[plan], SIZES["1m"]
    numel, block = parameters_of(size)
    places = {
        key: zero[key]["device"] for key in ("offload_optimizer", "offload_param") if key in zero
    }
    formula = estimate(numel, block, 1, zero["stage"], **places, device="cpu")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "bf16": {"enabled": True},
    }
    engine = initialize(model=GPT(size), config=config, device=device)[0]
    engine.backward(engine(next(batches(1, size.sequence, 0))))
    engine.step()
    held = engine.stage.tensors_by_kind()
    # Some tensors are views of others.
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for kind in ("master", "optimizer")
        for tensor in held.get(kind, [])
    }
    states = sum(storages.values())
    engine.close()
    expected = formula.master + formula.moments
    cases.add(
        f"held bytes {plan}",
        ok=abs(states / expected - 1) < 0.05,
        parameters_m=numel / 1e6,
        held_to_formula=states / expected,
    )


def release(device: torch.device) -> None:
    """Free what the last engine held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
