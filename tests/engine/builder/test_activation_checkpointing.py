"""Activation checkpointing: memory between forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.stage3_models import Language, make_batches
from zerolab.config import load_engine_config
from zerotrial.engine import initialize
from zerotrial.engine.builder.activation_checkpointing import checkpoint_blocks


def settings(**block: Any) -> Any:
    return load_engine_config(
        {"train_batch_size": 1, "activation_checkpointing": block}
    ).activation_checkpointing


def saved_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes of different tensors that a forward remembers for its backward."""
    remembered: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        remembered[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run().backward()
    return sum(remembered.values())


def language() -> nn.Module:
    torch.manual_seed(5)
    return Language(width=32, blocks=4)


def test_blocks_keep_only_their_inputs() -> None:
    tokens = torch.randint(13, (8, 32))
    plain, recomputing = language(), language()
    assert checkpoint_blocks(recomputing, settings(enabled=True)) == [
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.3",
    ]
    weights = sum(p.numel() for p in plain.parameters()) * 4
    before = saved_bytes(lambda: plain(tokens, tokens))
    after = saved_bytes(lambda: recomputing(tokens, tokens))
    assert after < 0.25 * before
    assert before > weights  # activations, not parameters, are measured
    for a, b in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_names_and_hooks_stay() -> None:
    model = language()
    names = [name for name, _ in model.named_parameters()]
    called = []
    model.get_submodule("blocks.1").register_forward_hook(lambda *_: called.append(1))
    checkpoint_blocks(model, settings(enabled=True))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(tokens, tokens).backward()
    assert [name for name, _ in model.named_parameters()] == names
    assert called == [1]


@pytest.mark.needs_extension("activation_storage")
def test_dropout_is_drawn_again_equally() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2)))
    x = torch.randn(4, 8)
    gradients = []
    for recompute in (False, True):
        if recompute:
            checkpoint_blocks(model, settings(cpu_checkpointing=True))
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_disabled_by_default() -> None:
    model = language()
    assert checkpoint_blocks(model, settings()) == []
    assert checkpoint_blocks(model, settings(enabled=False, cpu_checkpointing=True)) == []
    assert "forward" not in vars(model.get_submodule("blocks.0"))


@pytest.mark.needs_extension("activation_storage")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_inputs_wait_in_host_memory() -> None:
    allocated = []
    for offload in (False, True):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
        checkpoint_blocks(model, settings(enabled=True, cpu_checkpointing=offload))
        x = torch.randn(8192, 1024, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = model(x).sum()
        allocated.append(torch.cuda.memory_allocated() - before)
        out.backward()
    assert allocated[1] < 0.4 * allocated[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.needs_extension("activation_storage")
@pytest.mark.parametrize("block", [{"enabled": True}, {"cpu_checkpointing": True}])
def test_losses_are_equal_at_every_stage(stage: int, block: dict[str, bool]) -> None:
    losses = []
    for more in ({}, {"activation_checkpointing": block}):
        engine, *_ = initialize(
            model=language(),
            config={
                "train_batch_size": 2,
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": stage},
                **more,
            },
        )
        loss_lists = []
        for ((batch,),) in make_batches(3, 1, 1):
            loss = engine(*(part.to(engine.device) for part in batch))
            engine.backward(loss)
            engine.step()
            loss_lists.append(loss.item())
        engine.close()
        losses.append(loss_lists)
    assert losses[0] == losses[1]
