"""Activation formulas compared with the paper and with torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.formulas import block_activations, kept_activations

HEADS, WIDTH, LENGTH, SAMPLES = 4, 64, 32, 2
ACTIVATION = LENGTH * SAMPLES * WIDTH


class Block(nn.Module):
    """Block of the paper: two norms, attention, a feed-forward layer, three dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def drop(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0]  # like on a GPU: masks have one byte

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norms[0](x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        mixed = self.drop(scores.softmax(-1)) @ value
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


def test_block_activations_match_formula() -> None:
    block, saved = Block(), {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (
            storage,
            storage.nbytes(),
        )  # referenced, so that no address is reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(torch.randn(SAMPLES, LENGTH, WIDTH, requires_grad=True))
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved_bytes = sum(size for pointer, (_, size) in saved.items() if pointer not in weights)
    expected = block_activations(ACTIVATION, width=4, scores=HEADS * LENGTH / WIDTH)
    assert saved_bytes == expected + 2 * 2 * SAMPLES * LENGTH * 4  # mean and deviation of two norms


def test_formula_matches_paper() -> None:
    sbh, scores = 2048 * 12288, 96 * 2048 / 12288  # GPT-3 of 175 B: a s / h is 16
    assert block_activations(sbh, scores=scores) == sbh * (34 + 5 * scores)
    assert block_activations(sbh, scores=scores, tensor=8) == sbh * (10 + 24 / 8 + 5 * scores / 8)
    divided: dict[str, Any] = {"tensor": 8, "sequence_parallel": True}
    assert block_activations(sbh, scores=scores, **divided) == sbh * (34 + 5 * scores) / 8
    assert block_activations(sbh, **divided) == sbh * 34 / 8
    # Section 5: the recomputed part without stored scores is 70 % here.
    saved = 1 - block_activations(sbh) / block_activations(sbh, scores=scores)
    assert saved == pytest.approx(0.70, abs=0.01)


def test_checkpointing_keeps_block_inputs() -> None:
    block_bytes = block_activations(1000)
    assert kept_activations(1000, 12) == 12 * block_bytes
    assert (
        kept_activations(1000, 3, in_flight=4) == 12 * block_bytes
    )  # four stages store as much as one
    assert kept_activations(1000, 12, checkpointing=True) == 12 * 2000 + block_bytes
    cut = block_activations(1000, tensor=2)
    assert kept_activations(1000, 12, tensor=2, checkpointing=True) == 12 * 2000 + cut
    shared = kept_activations(1000, 12, tensor=2, checkpointing=True, partitioned=True)
    assert shared == 12 * 1000 + cut
