"""What a rank needs: the formula, and what ranks really hold."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, make_batches
from zerolab.errors import ConfigError
from zerotrial.engine import initialize
from zerotrial.engine.census import OTHER, census, storage_bytes
from zerotrial.engine.memory import MemoryEstimate, estimate, every_choice

P = 1_000_000


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_sixteen_bits_with_adam_cost_what_the_table_says(ranks: int) -> None:
    per_parameter = [estimate(P, 0, ranks, stage).device / P for stage in range(4)]
    n = ranks
    assert per_parameter == pytest.approx([16, 4 + 12 / n, 2 + 14 / n, 16 / n], rel=1e-4)


def test_fp32_parameters_are_their_own_master() -> None:
    per_parameter = [estimate(P, 0, 4, stage, precision="fp32").device / P for stage in range(4)]
    assert per_parameter == pytest.approx([16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4])


def test_fp32_accumulation_costs_two_bytes_more_where_gradients_are_kept() -> None:
    for stage, more in enumerate([2, 2, 2 / 4, 0]):
        plain, summed = (estimate(P, 0, 4, stage, fp32_accumulation=on) for on in (False, True))
        assert (summed.device - plain.device) / P == pytest.approx(more)


def test_offloading_moves_bytes_and_does_not_lose_any() -> None:
    for stage in (1, 2, 3):
        plain = estimate(P, 0, 4, stage)
        cpu = estimate(P, 0, 4, stage, offload_optimizer="cpu")
        nvme = estimate(P, 0, 4, stage, offload_optimizer="nvme")
        assert cpu.host == plain.master + plain.moments
        assert nvme.disk == plain.master + plain.moments
        kept = plain.master if stage == 3 else 0  # what is gathered stays on the device
        assert cpu.device == plain.device - cpu.host + kept
        assert nvme.device == plain.device - nvme.disk + kept
    everything = estimate(P, 0, 4, 3, offload_param="cpu")
    assert everything.device == 0
    assert everything.host == estimate(P, 0, 4, 3).device


def test_the_working_set_is_two_buckets_or_two_blocks() -> None:
    assert estimate(P, 0, 1, 2).working == 0
    assert estimate(P, 0, 4, 1).working == 0  # gradients are reduced where they lie
    assert estimate(P, 0, 4, 2, bucket_numel=1000).working == 2 * 2 * 1000
    assert estimate(P, 0, 4, 2).working == 2 * 2 * P
    assert estimate(P, 1000, 4, 3).working == 1000 * (2 + 2 + 2 + 4)
    found = estimate(P, 1000, 4, 3)
    assert found.peak_device == found.device + found.working


def test_impossible_questions_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(P, 0, 0, 0, offload_optimizer="cpu", offload_param="cpu", optimizer="adm")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "world_size",
        "offload_optimizer",
        "offload_param",
        "optimizer",
    ]


def test_every_choice_is_possible() -> None:
    found = list(every_choice(P, 1000, 8))
    assert {choice.stage for choice in found} == {0, 1, 2, 3}
    assert all(isinstance(choice, MemoryEstimate) for choice in found)


def test_a_storage_counts_once_through_however_many_views() -> None:
    whole = torch.zeros(1000)
    assert storage_bytes([whole, whole[10:], whole.view(10, 100)]) == 4000
    counted = census({"first": [whole[:5]], "second": [whole]})
    assert counted["first"] == 4000
    assert counted["second"] == 0
    stray = torch.zeros(50_000)
    assert census({"first": [whole]})[OTHER] >= storage_bytes([stray])


CASES = [
    *((stage, precision, 1) for stage in range(4) for precision in ("fp32", "bf16")),
    *((stage, "bf16", 2) for stage in range(4)),
]
"""Stage, precision, accumulation steps."""


def measure() -> dict[Any, dict[str, int]]:
    """Bytes by kind on this rank, after backward and a first step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    before = census({})[OTHER]
    for stage, precision, micro in CASES:
        model = Language(width=32, blocks=8)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
        }
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        numel = sum(p.numel() for p in model.parameters())
        engine, *_ = initialize(model=model, config=config)
        first, second = make_batches(2, micro, ranks)
        for batch in first:
            engine.backward(engine(*batch[rank]))
            engine.step()
        for batch in second:
            engine.backward(engine(*batch[rank]))
            if batch is not second[-1]:
                engine.step()
        kinds = census(engine.stage.held())
        kinds[OTHER] -= before
        found[stage, precision, micro] = {"numel": numel, **kinds}
        engine.close()
        del engine, model
    return found


@pytest.mark.processes
def test_ranks_hold_what_the_formula_says_at_every_stage() -> None:
    ranks = 2
    for found in run_on_ranks(measure, ranks):
        for (stage, precision, micro), kinds in found.items():
            wanted = estimate(
                kinds["numel"],
                0,
                ranks,
                stage,
                precision=precision,
                fp32_accumulation=micro > 1,
            )
            states = sum(
                kinds.get(k, 0) for k in ("parameters", "gradients", "master", "optimizer")
            )
            case = f"stage {stage}, {precision}, {micro} micro-batches: {kinds}"
            assert states == pytest.approx(wanted.device, rel=0.02), case
            if stage < 3:
                bucketed = estimate(
                    kinds["numel"], 0, ranks, stage, precision=precision, bucket_numel=10_000
                )
                assert kinds["buckets"] <= 1.05 * bucketed.working + 1000, case
            assert kinds[OTHER] <= 0.02 * wanted.device + 20_000, case
