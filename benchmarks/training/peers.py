"""The engines that are compared, each as a function that makes a step.

A step takes the micro-batches of one optimizer step on this rank and returns their mean loss.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training.gpt import GPT, SIZES, Block

__all__ = ["PEERS", "Case", "make_step", "shared_memory_of_deepspeed"]

LR, DECAY, CLIP = 3e-4, 0.01, 1.0
Step = Callable[[Sequence[Tensor]], float]


@dataclass(frozen=True)
class Case:
    """One measurement."""

    peer: str
    """``zerolab-1``, ``before-1``, ``deepspeed-2``, ``ddp``, ``fsdp2`` or ``limit``."""

    size: str
    precision: str
    ranks: int
    accumulation: int
    micro: int
    """Samples of a micro-batch on one rank."""

    offload: bool = False


def config_of(case: Case, stage: int) -> dict[str, Any]:
    """The JSON that both engines read."""
    zero: dict[str, Any] = {"stage": stage}
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": case.micro,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": zero,
        **({"bf16": {"enabled": True}} if case.precision == "bf16" else {}),
    }


def _engine_step(engine: Any) -> Step:
    def step(micro_batches: Sequence[Tensor]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        return float(total) / len(micro_batches)

    return step


def zerolab(case: Case, model: GPT, device: torch.device, stage: int) -> Step:
    import zerotrial

    engine, *_ = zerotrial.initialize(model=model, config=config_of(case, stage), device=device)
    return _engine_step(engine)


def deepspeed(case: Case, model: GPT, device: torch.device, stage: int) -> Step:
    del device
    import deepspeed as ds

    engine, *_ = ds.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(case, stage)
    )
    return _engine_step(engine)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)


def ddp(case: Case, model: GPT, device: torch.device, stage: int) -> Step:
    del stage
    gpus = [device] if device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(
        model.to(device), gradient_as_bucket_view=True, device_ids=gpus
    )
    optimizer = _optimizer(model.parameters())
    cast = torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16")

    def step(micro_batches: Sequence[Tensor]) -> float:
        total = 0.0
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                with cast:
                    loss = wrapped(batch)
                (loss / len(micro_batches)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / len(micro_batches)

    return step


def fsdp2(case: Case, model: GPT, device: torch.device, stage: int) -> Step:
    del stage
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if case.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.to(device)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = _optimizer(model.parameters())

    def step(micro_batches: Sequence[Tensor]) -> float:
        total = 0.0
        for batch in micro_batches:
            loss = model(batch)
            (loss / len(micro_batches)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / len(micro_batches)

    return step


def limit(case: Case, model: GPT, device: torch.device, stage: int) -> Step:
    """Every rank by itself: the loop that one writes by hand, with nothing sent.

    It does the work that an engine does: fp32 masters of a bf16 model, a sum in fp32 over several
    micro-batches, clipping, fused AdamW.
    """
    del stage
    model.to(device)
    mixed = case.precision == "bf16"
    masters: list[Tensor] = list(model.parameters())
    if mixed:
        masters = [p.detach().clone().requires_grad_() for p in masters]
        model.bfloat16()
    weights = list(model.parameters())
    optimizer = _optimizer(masters)
    sums = [torch.empty_like(master) for master in masters] if mixed else []

    def step(micro_batches: Sequence[Tensor]) -> float:
        total = 0.0
        for index, batch in enumerate(micro_batches):
            loss = model(batch)
            (loss / len(micro_batches)).backward()
            total += loss.detach()
            if mixed:
                _widen(weights, sums, add=index > 0)
        for master, gradient in zip(masters, sums, strict=mixed):
            master.grad = gradient
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](weights), masters)
        return float(total) / len(micro_batches)

    return step


def _widen(weights: list[nn.Parameter], sums: list[Tensor], *, add: bool) -> None:
    """Move the weights' gradients into fp32."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if add:
        torch._foreach_add_(sums, gradients)
    else:
        torch._foreach_copy_(sums, gradients)
    for weight in weights:
        weight.grad = None


Maker = Callable[[Case, GPT, torch.device, int], Step]
PEERS: dict[str, Maker] = {
    "zerolab": zerolab,
    "before": zerolab,  # of another working tree
    "deepspeed": deepspeed,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "limit": limit,
}


def make_step(case: Case, device: torch.device) -> tuple[Step, int]:
    """Build a peer on this rank.

    Returns:
        Its step, and the model's parameters.
    """
    torch.manual_seed(0)
    name, _, stage = case.peer.partition("-")
    with device:  # billions of random numbers take long on a CPU
        model = GPT(SIZES[case.size])
    numel = sum(parameter.numel() for parameter in model.parameters())
    return PEERS[name](case, model, device, int(stage or 0)), numel


def shared_memory_of_deepspeed() -> Iterator[Path]:
    """Files that DeepSpeed leaves in shared memory and never removes, of this user."""
    for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                yield path
