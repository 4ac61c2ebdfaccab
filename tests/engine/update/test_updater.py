"""Updates in memory: gradients of 16 bits, and scales that the optimizer's kernel applies."""

import pytest
import torch
from torch import Tensor

from zerolab.config import load_engine_config
from zerotrial.engine.protocols import UpdaterInputs
from zerotrial.engine.update.factory import choose_optimizer
from zerotrial.engine.update.in_memory import ElementwiseUpdater

SIZES = [40, 7, 1000]


def make_updater(optimizer: str) -> ElementwiseUpdater:
    config = load_engine_config(
        {"train_batch_size": 1, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    )
    return ElementwiseUpdater(
        UpdaterInputs(
            masters=[torch.linspace(-1, 1, size) for size in SIZES],
            group_indices=[0] * len(SIZES),
            groups=[{}],
            optimizer_factory=choose_optimizer(config, None),
            config=config,
            device=torch.device("cpu"),
        )
    )


def published(updater: ElementwiseUpdater, dtype: torch.dtype, scale: float) -> list[Tensor]:
    weights = [torch.zeros(size, dtype=torch.bfloat16) for size in SIZES]
    for step in range(3):
        for index, size in enumerate(SIZES):
            generator = torch.Generator().manual_seed(10 * step + index)
            gradient = torch.randn(size, generator=generator).bfloat16().to(dtype)
            assert updater.step(index, gradient, scale, weights[index])
        updater.finish()
    return weights


@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "SGD"])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_gradients_of_16_bits_match_32(optimizer: str, scale: float) -> None:
    narrow = published(make_updater(optimizer), torch.bfloat16, scale)
    wide = published(make_updater(optimizer), torch.float32, scale)
    for actual, expected in zip(narrow, wide, strict=True):
        assert torch.equal(actual, expected)
        assert actual.any()


def test_gradients_are_widened_in_reused_memory() -> None:
    updater = make_updater("AdamW")
    places = {
        updater._widened(torch.ones(size, dtype=torch.bfloat16), torch.float32).data_ptr()
        for size in SIZES
    }
    assert len(places) == 1
    gradient = torch.ones(5)
    assert updater._widened(gradient, torch.float32) is gradient
