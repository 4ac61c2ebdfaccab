"""DeepSpeed's functions for parameters, checkpointing and comm, compared with plain torch."""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.ranks import run_on_ranks
from zerotrial.extensions.deepspeed_api import install
from zerotrial.extensions.deepspeed_api.names import checkpointing

pytestmark = pytest.mark.processes

ROWS = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
"""Three samples of each rank."""


class Net(nn.Module):
    """Module that recomputes its first part in the backward if ``again`` is set."""

    def __init__(self, again: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.last = nn.Linear(5, 2)
        self.again, self.calls = again, 0
        self.first.register_forward_pre_hook(self.count)  # a second time it may end early

    def count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) if self.again is None else self.again(self.first, x)
        return self.last(hidden).square().mean()


def begin(stage: int, *, bf16: bool = False, **zero: Any) -> Any:
    import deepspeed

    file = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
    }
    model = Net(deepspeed.checkpointing.checkpoint)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=file)[0]


def full_values(stage: int) -> None:
    """Compare reads with plain torch, and train from written values."""
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )

    def close(actual: Tensor, expected: Tensor, atol: float) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol)

    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    engine = begin(stage)
    for update in range(2):
        optimizer.zero_grad()
        plain(ROWS.flatten(0, 1)).backward()
        engine.module.calls = 0
        engine.backward(engine(ROWS[dist.get_rank()]))
        assert engine.module.calls == 2, "deepspeed.checkpointing.checkpoint computes it again"
        pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
        for parameter, reference in pairs:
            assert reference.grad is not None
            # A sum of about twelve terms of size 1 in another order.
            close(safe_get_full_grad(parameter), reference.grad, atol=5e-7)
            # Adam divides exp_avg by the gradient's size, which scales the error too
            # of the smallest gradient as a relative one: both continue with the same gradients.
            if update == 0:
                reference.grad.mul_(-2)
            safe_set_full_grad(parameter, reference.grad.clone())
            close(safe_get_full_grad(parameter), reference.grad, atol=0)
        engine.step()
        optimizer.step()
        for parameter, reference in pairs:
            close(safe_get_full_fp32_param(parameter), reference.detach(), atol=1e-7)
            for state in ("exp_avg", "exp_avg_sq"):
                full_state = safe_get_full_optimizer_state(parameter, state)
                close(full_state, optimizer.state[reference][state], atol=0)
            values = torch.linspace(-1, 1, reference.numel()).view(reference.shape)
            with torch.no_grad():
                reference.copy_(values)
            safe_set_full_fp32_param(parameter, values)
            optimizer.state[reference]["exp_avg"].copy_(values)
            safe_set_full_optimizer_state(parameter, values, "exp_avg")
    engine.close()


def sharded_values(stage: int) -> None:
    """Tensors derived from DTensor parameters at stage 3 can be written."""
    import deepspeed
    from deepspeed import utils

    x = torch.ones(2, requires_grad=True)
    again = deepspeed.checkpointing.checkpoint
    again(lambda x, scale, debug: (x * scale).sum(), x, scale=2, debug=True).backward()
    assert x.grad is not None
    assert x.grad.eq(2).all()
    engine = begin(stage)
    engine.backward(engine(ROWS[dist.get_rank()]))
    for parameter in engine.module.parameters():
        utils.safe_set_full_grad(parameter, torch.full_like(parameter, 0.25))
        assert utils.safe_get_full_grad(parameter).eq(0.25).all()
        utils.safe_set_full_fp32_param(parameter, parameter.detach() * 0 + 3)
        assert utils.safe_get_full_fp32_param(parameter).eq(3).all()
        utils.safe_set_full_optimizer_state(parameter, torch.ones_like(parameter), "exp_avg")
        assert utils.safe_get_full_optimizer_state(parameter, "exp_avg").eq(1).all()
    engine.close()


class Inner(nn.Module):
    """Module with children, for nested construction on the meta device."""

    def __init__(self, size: int, device: Any = None) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(size, size, device=device), nn.Tanh())
        self.last = nn.Linear(size, 2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pair(x)).square().mean()


def built_with_skip_init(stage: int) -> None:
    import deepspeed

    file = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    torch.manual_seed(3)
    plain = Inner(4)
    with deepspeed.zero.Init():
        inner = torch.nn.utils.skip_init(Inner, 4)
        inner.load_state_dict(plain.state_dict())
        model = nn.Sequential(inner)
    engine = deepspeed.initialize(model=model, config=file)[0]
    loss = engine(ROWS[dist.get_rank()])
    torch.testing.assert_close(loss, plain(ROWS[dist.get_rank()]))
    engine.backward(loss)
    engine.step()
    engine.close()


def gather_before_init(stage: int) -> None:
    """Within GatheredParameters earlier references are full on every rank."""
    import deepspeed

    engine, plain = begin(stage), Net()
    expected = list(plain.parameters())
    references = list(engine.module.parameters())
    gathered = deepspeed.zero.GatheredParameters
    with gathered(references, modifier_rank=1), torch.no_grad():
        for actual, full in zip(references, expected, strict=True):
            assert actual.shape == full.shape
            assert float(actual.norm()) == pytest.approx(float(full.norm()))
        with gathered(references[:1]):  # full already
            pass
        expected[0].copy_(torch.arange(20.0).view(5, 4))
        expected[1][2:].mul_(3)
        expected[3].fill_(0.5)
        if dist.get_rank() == 1:
            references[0].copy_(torch.arange(20.0).view(5, 4))
            references[1][2:].mul_(3)
            references[3].data.fill_(0.5)
            assert torch.equal(engine.module.last.bias, expected[3])
    for actual, full in zip(references, expected, strict=True):
        parameter_value = deepspeed.utils.safe_get_full_fp32_param(actual)
        torch.testing.assert_close(parameter_value, full.detach(), rtol=0, atol=0)
    loss = engine(ROWS[dist.get_rank()])
    torch.testing.assert_close(loss, plain(ROWS[dist.get_rank()]))
    engine.backward(loss)
    engine.step()
    engine.close()


def save_state_dicts(threshold: int) -> None:
    """State dicts of a bf16 model at stage 3 are plain, full and loadable."""
    import deepspeed

    engine = begin(3, bf16=True, stage3_param_persistence_threshold=threshold)
    status = deepspeed.zero.ZeroParamStatus
    at_rest = (status.AVAILABLE, torch.bfloat16)  # small parameters are always replicated
    if threshold == 0:
        at_rest = (status.NOT_AVAILABLE, torch.float32)
    names, references = zip(*engine.module.named_parameters(), strict=True)
    assert len({p.ds_id for p in references}) == len(references)
    saved = {}
    for name, p in zip(names, references, strict=True):
        assert p.ds_status == at_rest[0]
        whole_shape = p.ds_shape
        with deepspeed.zero.GatheredParameters([p], modifier_rank=1):
            assert p.ds_status == status.AVAILABLE
            saved[name] = p.data.detach().cpu().clone()
            assert saved[name].shape == whole_shape
            if dist.get_rank() == 1 and p.dim() == 1:
                p.data.mul_(2)
            elif dist.get_rank() == 1:
                p.data = p.data * 2
        assert (p.ds_status, p.dtype) == at_rest
        actual = deepspeed.utils.safe_get_full_fp32_param(p)
        torch.testing.assert_close(actual, saved[name].float() * 2, rtol=0, atol=0)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    again = Net()
    again.load_state_dict(torch.load(file, weights_only=True))
    for restored, expected in zip(again.parameters(), Net().parameters(), strict=True):
        assert torch.equal(restored, expected.bfloat16().float())
    if dist.get_rank() == 0:  # many scripts also save this, on one rank
        torch.save(engine.module.state_dict(), io.BytesIO())
    engine.backward(engine(ROWS[dist.get_rank()].bfloat16()).float())
    engine.step()
    engine.tput_timer.update_epoch_count()
    engine.close()


def devices() -> None:
    """Check the accelerator functions that scripts use, on a CPU."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.utils import see_memory_usage, set_random_seed

    accelerator = get_accelerator()
    set_random_seed(7)
    drawn = torch.rand(3)
    accelerator.manual_seed_all(7)
    assert torch.equal(torch.rand(3), drawn)
    accelerator.set_rng_state(state := accelerator.get_rng_state())
    assert torch.equal(accelerator.get_rng_state(), state)
    before, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
    assert 0 < before <= accelerator.total_memory()
    assert most > 0
    accelerator.reset_peak_memory_stats()
    see_memory_usage("after the forward", force=True)
    with accelerator.device(0):
        assert accelerator.on_accelerator(accelerator.pin_memory(drawn))
    assert torch.bfloat16 in accelerator.supported_dtypes()
    with pytest.raises(AttributeError, match=r"get_accelerator\(\)\.nowhere: Zerolab replaces"):
        _ = accelerator.nowhere


def communicate() -> None:
    import deepspeed.comm as comm

    rank = dist.get_rank()
    assert (comm.get_rank(), comm.get_world_size()) == (rank, 2)
    assert comm.is_initialized()
    values = torch.arange(3.0) + 10 * rank
    total = values.clone()
    comm.all_reduce(total)
    assert total.tolist() == [10, 12, 14]
    comm.all_reduce(total := values.clone(), op=comm.ReduceOp.MAX)
    assert total.tolist() == [10, 11, 12]
    parts = [torch.empty(3), torch.empty(3)]
    comm.all_gather(parts, values)
    assert torch.stack(parts).tolist() == [[0, 1, 2], [10, 11, 12]]
    comm.broadcast(values, src=1)
    assert values.tolist() == [10, 11, 12]
    every: list[Any] = [None, None]
    comm.all_gather_object(every, {"rank": rank})
    assert every == [{"rank": 0}, {"rank": 1}]
    comm.barrier(group=comm.get_world_group())


def on_device() -> None:
    import deepspeed

    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        foreign = nn.Linear(2, 2)
    assert (foreign.weight.dtype, foreign.weight.device.type) == (torch.bfloat16, "meta")
    torch.manual_seed(3)
    with deepspeed.OnDevice(dtype=torch.float64, device="cpu"):
        actual = nn.Linear(2, 2)
    torch.manual_seed(3)
    assert torch.equal(actual.weight, nn.Linear(2, 2, dtype=torch.float64).weight)
    with deepspeed.OnDevice(dtype=torch.float64, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32


def all_cases() -> bool:
    install()
    import deepspeed

    deepspeed.init_distributed("nccl")  # scripts use it for their GPUs
    deepspeed.checkpointing.configure(None, partition_activations=False)
    assert deepspeed.checkpointing.is_configured()
    for stage in (0, 1, 2, 3):
        full_values(stage)
        gather_before_init(stage)
        sharded_values(stage)
    for stage in (0, 3):
        built_with_skip_init(stage)
    for threshold in (0, 100_000):
        save_state_dicts(threshold)
    communicate()
    on_device()
    devices()
    return True


def test_parameter_functions_match_plain_torch() -> None:
    assert all(run_on_ranks(all_cases, 2))


@pytest.mark.parametrize("named", [{"scale": 2.0}, {"scale": 2.0, "use_reentrant": True}])
def test_checkpoint_passes_keyword_arguments(named: dict[str, Any]) -> None:
    calls = []

    def layer(x: torch.Tensor, *, scale: float, debug: bool = False) -> torch.Tensor:
        calls.append(debug)
        return (x * scale).sin()

    weights = torch.ones(3, requires_grad=True)
    actual = checkpointing.checkpoint(layer, weights, **named, debug=True)
    actual.sum().backward()
    torch.testing.assert_close(weights.grad, 2.0 * torch.cos(torch.full((3,), 2.0)))
    assert calls == [True, True]
