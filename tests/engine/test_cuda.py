"""GPU-specific behaviour: parity with a plain loop, offload, checkpoints, waits, NCCL.

Most need a GPU, the last one two; the first tests run on a CPU.
"""

import importlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.checkpointing import Ranks
from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, decay_groups, make_batches, train_plainly
from tests.extensions.shared_memory.test_shared_memory import check_copies, check_reductions
from zerotrial.engine import Engine, initialize
from zerotrial.engine.builder.activation_checkpointing import checkpoint_blocks
from zerotrial.engine.comm.communicator import GroupCommunicator
from zerotrial.extensions.pipeline import LayerSpec, PipelineModule
from zerotrial.extensions.profiler.flops import peak_flops

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
each_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])

GPU = torch.device("cuda")
STEPS, MICRO, CLIP, LR = 6, 2, 0.5, 1e-2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CLOSE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Relative; kernels on GPUs may add up in another order from run to run."""


def language() -> nn.Module:
    torch.manual_seed(5)
    return Language(width=32, blocks=3)


class Noisy(nn.Module):
    """Its loss depends on the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.first(x), 0.5)
        loss: Tensor = (self.last(hidden) - x).square().mean()
        return loss


def config_of(stage: int, precision: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 10_000, **more.pop("zero", {})}
    kinds: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * MICRO * ranks,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        **kinds[precision],
        **more,
    }


def make_engine(model: nn.Module, config: dict[str, Any], **more: Any) -> Engine:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, fused=True)

    more.setdefault("device", GPU)
    return initialize(
        model=model, optimizer=adam, model_parameters=decay_groups(model), config=config, **more
    )[0]


def train(engine: Engine, batches: list[list[list[Any]]], rank: int = 0) -> list[float]:
    losses = []
    for step in batches:
        total = 0.0
        for micro in step:
            loss = engine(*(part.to(engine.device) for part in micro[rank]))
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(step)
        losses.append(total)
    return losses


def losses_of(config: dict[str, Any], **more: Any) -> list[float]:
    engine = make_engine(language(), config, **more)
    losses = train(engine, make_batches(STEPS, MICRO, 1))
    engine.close()
    return losses


def plain_losses(precision: str, ranks: int = 1) -> list[float]:
    batches = [
        [[tuple(part.to(GPU) for part in batch) for batch in micro] for micro in step]
        for step in make_batches(STEPS, MICRO, ranks)
    ]
    course = train_plainly(
        lambda: language().to(GPU),
        batches,
        lambda groups: torch.optim.AdamW(groups, lr=LR, fused=True),
        clip=CLIP,
        dtype=DTYPES[precision],
        scale=1024.0 if precision == "fp16" else 1.0,
    )
    return course.losses


def reduce_as_on_gpus() -> str:
    """NCCL's way, over gloo: in place, and with the mean taken by the backend."""
    group = dist.group.WORLD
    assert group is not None
    comm = GroupCommunicator(group, torch.device("cpu"))
    comm._native = True
    check_reductions(comm)
    for dtype in (torch.float32, torch.bfloat16):
        for add in (False, True):
            buffer = comm.allocate(8 * comm.size, dtype, torch.device("cpu"))
            buffer.tensor.copy_(torch.arange(8 * comm.size) * (comm.rank + 1))
            mean = (torch.arange(8 * comm.size) * (comm.size + 1) / 2)[comm.rank * 8 :][:8]
            shard = buffer.tensor[comm.rank * 8 :][:8]
            expected = mean + shard.float() * add
            comm.reduce_scatter(buffer, shard, 1 / comm.size, add=add).wait()
            assert shard.tolist() == expected.tolist()
    comm._native = False
    check_copies(comm)
    return "done"


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="Gloo sums for AVG"
)
@pytest.mark.processes
def test_shards_are_reduced_in_place() -> None:
    assert run_on_ranks(reduce_as_on_gpus, 2) == ["done", "done"]


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count reads of device numbers by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.count += 1
            return 2.0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_step_reads_one_number_from_the_device(
    monkeypatch: pytest.MonkeyPatch, stage: int, precision: str
) -> None:
    """The meta device computes nothing, but rejects mixed devices and copies to the host."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_device_dtype_check_for_fused", lambda *_, **__: None)
    config = config_of(stage, precision)
    engine = make_engine(language().to("meta"), config, device="meta")
    with Reads() as reads:
        for step in range(3):
            for _ in range(MICRO):
                tokens = torch.zeros(2, 6, dtype=torch.long, device="meta")
                engine.backward(engine(tokens, tokens))
                engine.step()
            assert reads.count == step + 1  # the norm
    allocated = [
        tensor for tensors in engine.stage.tensors_by_kind().values() for tensor in tensors
    ]
    assert {tensor.device.type for tensor in allocated} == {"meta"}
    engine.close()


@on_gpu
@each_stage
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gpu_training_matches_plain_loop(stage: int, precision: str) -> None:
    losses = losses_of(config_of(stage, precision))
    assert losses == pytest.approx(plain_losses(precision), rel=CLOSE[precision])
    assert losses[-1] < losses[0]


@on_gpu
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_states_match_gpu_states(
    tmp_path: Path, stage: int, precision: str, device: str
) -> None:
    offload = {"device": device} | ({"nvme_path": str(tmp_path)} if device == "nvme" else {})
    away = losses_of(config_of(stage, precision, zero={"offload_optimizer": offload}))
    assert away == pytest.approx(losses_of(config_of(stage, precision)), rel=CLOSE[precision])


@on_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_parameters_match_gpu_parameters(precision: str) -> None:
    offload = {"device": "cpu"}
    zero = {"offload_param": offload, "offload_optimizer": offload}
    away = losses_of(config_of(3, precision, zero=zero))
    assert away == pytest.approx(losses_of(config_of(3, precision)), rel=CLOSE[precision])


@on_gpu
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ],
)
def test_offloaded_model_is_never_on_the_gpu_in_fp32(zero: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    full_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(model, config_of(zero["stage"], "bf16", zero=zero))
    assert torch.cuda.max_memory_allocated() - before < 0.8 * full_bytes
    engine.close()


@on_gpu
@each_stage
def test_gpu_checkpoint_resumes_on_gpu_and_cpu(tmp_path: Path, stage: int) -> None:
    batches = make_batches(STEPS, MICRO, 1)
    engine = make_engine(language(), config_of(stage, "fp32"))
    train(engine, batches[:2])
    engine.save_checkpoint(tmp_path, async_save=True)
    losses = train(engine, batches[2:])
    engine.load_checkpoint(tmp_path)
    assert train(engine, batches[2:]) == pytest.approx(losses, rel=1e-5)
    engine.close()
    other = make_engine(language(), config_of(3 - stage, "fp32"), device="cpu")
    other.load_checkpoint(tmp_path)
    assert train(other, batches[2:]) == pytest.approx(losses, rel=CLOSE["fp32"])
    other.close()


@on_gpu
def test_gpu_random_state_resumes(tmp_path: Path) -> None:
    batches = [[[(torch.ones(8, 64),)]] * MICRO] * 4
    engine = make_engine(Noisy(), config_of(1, "fp32"))
    train(engine, batches)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, batches)
    engine.load_checkpoint(tmp_path)
    assert train(engine, batches) == pytest.approx(losses, rel=1e-5)
    engine.close()


@on_gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_block_inputs_wait_on_the_host(stage: int) -> None:
    block = {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}}
    losses = losses_of(config_of(stage, "fp32", ranks=1, **block))
    assert losses == pytest.approx(losses_of(config_of(stage, "fp32")), rel=CLOSE["fp32"])


@on_gpu
def test_offloaded_activations_take_no_gpu_memory() -> None:
    from zerolab.config import load_engine_config

    def allocated(**block: Any) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
        config = load_engine_config({"train_batch_size": 1, "activation_checkpointing": block})
        checkpoint_blocks(model.to(GPU), config.activation_checkpointing)
        x = torch.randn(4096, 64, device=GPU, requires_grad=True)
        before = torch.cuda.memory_allocated()
        loss = model(x).sum()
        after = torch.cuda.memory_allocated() - before
        loss.backward()
        return after

    inputs = 4096 * 64 * 4
    # 7 inputs are kept; other memory may be freed meanwhile.
    assert allocated(enabled=True) >= 5 * inputs
    assert allocated(enabled=True, cpu_checkpointing=True) < 2 * inputs


@on_gpu
@each_stage
def test_step_synchronizes_once(stage: int) -> None:
    engine = make_engine(language(), config_of(stage, "bf16"))
    batches = make_batches(STEPS, MICRO, 1)
    train(engine, batches[:2])  # objects created in the first step
    on_device = [[part.to(GPU) for part in micro[0]] for micro in batches[2]]
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in on_device:
                engine.backward(engine(*batch))
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchronizing CUDA" in str(w.message)]
    assert len(waits) == 1  # for the norm
    engine.close()


@on_gpu
def test_non_finite_gradient_is_skipped_on_gpu() -> None:
    config = config_of(1, "fp16") | {"fp16": {"enabled": True, "initial_scale_power": 24}}
    engine = make_engine(language(), config)
    losses = train(engine, make_batches(12, MICRO, 1))
    assert engine.skipped_steps > 0
    assert engine.loss_scale < 2.0**24
    assert all(math.isfinite(loss) for loss in losses)
    engine.close()


@on_gpu
def test_rates_and_mfu_are_reported() -> None:
    engine = make_engine(language(), config_of(1, "bf16", steps_per_print=2))
    train(engine, make_batches(STEPS, MICRO, 1))
    rates = engine.observer.rates
    assert rates["samples_per_second"] > 0
    assert rates["tflops"] > 0
    peak = peak_flops(torch.device("cuda"), torch.bfloat16)
    if peak is not None:
        assert rates["mfu"] == pytest.approx(rates["tflops"] * 1e12 / peak)
    engine.close()


def losses_over_nccl(precision: str) -> dict[int, list[float]]:
    """Two GPUs of a world that gloo has brought together."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert group is not None
    results = {}
    for stage in range(4):
        config = config_of(stage, precision, ranks)
        device = torch.device("cuda", rank)
        engine = make_engine(language(), config, mpu=Ranks(group), device=device)
        losses = train(engine, make_batches(STEPS, MICRO, ranks), rank)
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total)
        results[stage] = (total / ranks).tolist()
        engine.close()
    return results


def shares_over_nccl() -> dict[int, dict[str, float]]:
    """Return the breakdown of a step at each stage."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert group is not None
    results = {}
    for stage in range(4):
        config = config_of(stage, "bf16", ranks, wall_clock_breakdown=True, steps_per_print=STEPS)
        device = torch.device("cuda", rank)
        engine = make_engine(language(), config, mpu=Ranks(group), device=device)
        train(engine, make_batches(STEPS, MICRO, ranks), rank)
        results[stage] = dict(engine.observer.measured)
        engine.close()
    return results


def frozen_on_the_host() -> list[bool]:
    """Model in host memory with a frozen part that is gathered during and after training."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group, device = dist.new_group(backend="nccl"), torch.device("cuda", rank)
    assert group is not None
    model = language()
    model.get_submodule("blocks.0").requires_grad_(False)
    before = {name: value.clone() for name, value in model.named_parameters()}
    offload = {"device": "cpu"}
    config = config_of(3, "fp32", 2, zero={"offload_param": offload, "offload_optimizer": offload})
    engine = make_engine(model, config, mpu=Ranks(group), device=device)
    full = engine.full_state_dict()
    same = [torch.equal(full[name].cpu(), before[name]) for name in (before if full else ())]
    engine.close()
    return same + [torch.equal(p.cpu(), before[name]) for name, p in model.named_parameters()]


def evaluated_in_turns(path: str, device: str) -> float:
    """Two pipeline ranks with two chunks each, whose activations are larger than NCCL's buffers."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    rendezvous = {"init_method": f"file://{path}/world", "rank": rank, "world_size": 2}
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **rendezvous)
    width = 2048 if device == "cuda" else 8
    model = PipelineModule(
        [LayerSpec(nn.Linear, width, width) for _ in range(4)],
        num_stages=2,
        chunks=2,
        loss_fn=nn.functional.mse_loss,
    )
    config = {
        "train_micro_batch_size_per_gpu": width,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"schedule": "interleaved"},
    }
    engine: Any = initialize(
        model=model, config=config, device=f"cuda:{rank}" if device == "cuda" else "cpu"
    )[0]
    ones = torch.ones(width, width)
    loss = float(engine.eval_batch(iter([(ones, ones)] * 4)))
    engine.close()
    return loss


@pytest.mark.processes
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_two_gpus)])
def test_two_pipeline_ranks_evaluate_independently(tmp_path: Path, device: str) -> None:
    gpus = device == "cuda"
    first, second = run_on_ranks(evaluated_in_turns, 2, str(tmp_path), device, gpus=gpus)
    assert first == second
    assert math.isfinite(first)


@on_two_gpus
@pytest.mark.processes
def test_frozen_host_parameters_are_gathered_over_nccl() -> None:
    assert all(all(same) for same in run_on_ranks(frozen_on_the_host, 2, gpus=True))


@on_two_gpus
@pytest.mark.processes
def test_nccl_communication_is_reported_at_every_stage() -> None:
    first, second = run_on_ranks(shares_over_nccl, 2, gpus=True)
    assert second == {stage: {} for stage in range(4)}  # rank 0 alone measures
    hidden = []
    for stage, measured in first.items():
        shares = {name: part for name, part in measured.items() if name.endswith("_share")}
        hidden.append(shares.pop("hidden_communication_share"))
        assert 0 <= hidden[-1] < 1, stage  # a small model may have nothing to hide it behind
        assert 0 < shares["communication_share"] < 1, stage
        assert sum(shares.values()) == pytest.approx(1), stage
    assert max(hidden) > 0


@on_two_gpus
@pytest.mark.processes
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_match_one_loop(precision: str) -> None:
    expected = plain_losses(precision, ranks=2)
    for results in run_on_ranks(losses_over_nccl, 2, precision, gpus=True):
        for losses in results.values():
            assert losses == pytest.approx(expected, rel=CLOSE[precision])
