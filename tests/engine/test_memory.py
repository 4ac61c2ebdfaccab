"""What a rank needs: the formula, and what ranks really hold."""

import contextlib
import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, make_batches
from zerolab.errors import ConfigError
from zerotrial.engine import initialize
from zerotrial.engine.memory import WHOLE, Place, estimate, every_choice
from zerotrial.engine.watch.census import OTHER, census, storage_bytes

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
        plain, summed = (estimate(P, 0, 4, stage, grad_accum_dtype=t) for t in (None, "fp32"))
        assert summed.accumulation / P == pytest.approx(more)
        assert plain.accumulation == 0
        assert summed.device - summed.accumulation == plain.device
    narrow = estimate(P, 0, 4, 1, precision="fp32", grad_accum_dtype="bf16")
    assert (narrow.gradients, narrow.accumulation) == (2 * P, 0)


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
    in_place = estimate(P, 0, 4, 3, offload_optimizer="nvme", device="cpu")
    assert (in_place.disk, in_place.device) == (8 * P / 4, 8 * P / 4)
    everything = estimate(P, 0, 4, 3, offload_param="cpu")
    assert everything.device == 0
    assert everything.host == estimate(P, 0, 4, 3).device


def test_the_working_set_is_two_buckets_or_two_blocks() -> None:
    assert estimate(P, 0, 4, 1).working == 0  # gradients are reduced where they lie
    assert estimate(P, 0, 4, 1, communication_data_type="fp32").working == 4 * P
    assert estimate(P, 0, 4, 2, bucket_numel=1000).working == 2 * 2 * 1000
    assert estimate(P, 0, 4, 2).working == 2 * 2 * P
    assert estimate(P, 1000, 4, 3).working == 1000 * (2 + 2 + 2 + 4)
    found = estimate(P, 1000, 4, 3)
    assert found.peak_device == found.device + found.working
    shared = estimate(P, 1000, 4, 3, device="cpu")
    assert shared.working == 1000 * (2 + 2 + 2 + 3 * 2) + 2 * P / 4


def test_what_is_under_way_in_the_hosts_memory_counts_beside_the_states() -> None:
    cpu = estimate(P, 0, 4, 1, offload_optimizer="cpu", grad_accum_dtype="fp32")
    assert cpu.host_working == (4 + 2) * P / 4
    assert cpu.peak_host == cpu.host + cpu.host_working
    assert estimate(P, 0, 4, 1, offload_optimizer="cpu", device="cpu").host_working == 0
    nvme = estimate(P, 0, 4, 1, offload_optimizer="nvme", bucket_numel=1000)
    assert nvme.host_working == 4 * 1000 * 12 / 4
    assert estimate(P, 0, 4, 1, offload_optimizer="nvme").host_working == 12 * P / 4


def test_whole_parameter_optimizers_have_a_copy_of_the_weights_at_stage_3() -> None:
    adam, lamb = (estimate(P, 0, 4, 3, optimizer=name) for name in ("adam", "lamb"))
    assert lamb.device - adam.device == 4 * P / 4
    assert estimate(P, 0, 4, 2, optimizer="lamb") == estimate(P, 0, 4, 2)


def test_impossible_questions_are_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(P, 0, 0, 0, offload_optimizer="cpu", offload_param="cpu", optimizer="adm")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "world_size",
        "offload_optimizer",
        "offload_param",
        "optimizer",
    ]


def test_the_choices_are_all_that_are_possible() -> None:
    places: list[Place] = ["none", "cpu", "nvme"]
    possible = set()
    for stage, states, shards in itertools.product(range(4), places, places):
        with contextlib.suppress(ConfigError):
            possible.add(estimate(P, 1000, 8, stage, states, shards))
    alone = estimate(P, 1000, 8, 3, "none", "cpu")  # states go with the shards
    together = estimate(P, 1000, 8, 3, "cpu", "cpu")
    assert replace(alone, offload_optimizer="cpu") == together
    found = list(every_choice(P, 1000, 8))
    assert len(found) == len(set(found))
    assert set(found) == possible - {alone}


def test_a_storage_counts_once_through_however_many_views() -> None:
    whole = torch.zeros(1000)
    assert storage_bytes([whole, whole[10:], whole.view(10, 100)]) == 4000
    counted = census({"first": [whole[:5]], "second": [whole]})
    assert counted["first"] == 4000
    assert counted["second"] == 0
    stray = torch.zeros(50_000)
    assert census({"first": [whole]})[OTHER] >= storage_bytes([stray])


RANKS = (1, 2, 4)
PRECISIONS = ("fp32", "bf16", "fp16")
CASES = [
    (stage, precision, kept, offload)
    for stage in range(4)
    for precision in PRECISIONS
    for kept in ("fp32", "bf16")
    for offload in ("none", "cpu", "nvme")
    if stage or offload == "none"
]
"""Stage, precision, ``grad_accum_dtype``, where optimizer states are."""

BUCKET = 1024
STATES = ("parameters", "gradients", "master", "optimizer")


class Replicas:
    """Worlds of a few ranks, side by side."""

    def __init__(self, size: int) -> None:
        everyone = range(dist.get_world_size())
        groups = [dist.new_group(everyone[at : at + size]) for at in everyone[::size]]
        self.index = dist.get_rank() // size
        self.count = len(groups)
        self._mine = groups[self.index]

    def get_data_parallel_group(self) -> Any:
        return self._mine


def measure(directory: str) -> dict[Any, dict[str, int]]:
    """Bytes by kind on this rank, between backward and the second step.

    Where there are several worlds of a size, each takes its part of the cases.
    """
    found = {}
    measure_case(Replicas(1), directory, *CASES[-1])  # imports what a run needs
    gc.collect()
    gc.freeze()  # what is here now is neither walked nor counted
    for ranks in RANKS:
        world = Replicas(ranks)
        for case in CASES[world.index :: world.count]:
            found[ranks, *case] = measure_case(world, directory, *case)
    for name in WHOLE:
        found[name] = measure_case(world, directory, 3, "bf16", "fp32", "none", name)
    return found


def measure_case(
    world: Replicas,
    directory: str,
    stage: int,
    precision: str,
    kept: str,
    offload: str,
    optimizer: str = "AdamW",
) -> dict[str, int]:
    model = Language(width=16, blocks=2)
    numel = sum(p.numel() for p in model.parameters())
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": offload}
    if offload == "nvme":
        zero["offload_optimizer"]["nvme_path"] = directory
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": optimizer},
        "data_types": {"grad_accum_dtype": kept},
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config[precision]["initial_scale_power"] = 4
    engine, *_ = initialize(model=model, config=config, mpu=world)
    first, second = make_batches(2, 1, 1)
    engine.backward(engine(*first[0][0]))
    assert engine.step().updated
    engine.backward(engine(*second[0][0]))
    kinds = census(engine.stage.held())
    engine.close()
    block = sum(p.numel() for p in Language(width=16, blocks=1).blocks.parameters())
    return {"numel": numel, "block": block, **kinds}


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, int]]]:
    return run_on_ranks(measure, 4, str(tmp_path_factory.mktemp("states")))


@pytest.mark.processes
@pytest.mark.parametrize("optimizer", sorted(WHOLE))
def test_ranks_that_own_whole_parameters_hold_the_formula_together(
    every_rank: list[dict[Any, dict[str, int]]], optimizer: str
) -> None:
    found = [kinds[optimizer] for kinds in every_rank]
    wanted = estimate(found[0]["numel"], 0, 4, 3, optimizer=optimizer, device="cpu")
    gradients = sum(kinds["gradients"] for kinds in found)
    assert gradients == pytest.approx(4 * wanted.gradients, rel=0.02), found
    moments = sum(kinds["optimizer"] for kinds in found)
    few = 0.05 if optimizer == "muon" else 0.02  # Muon keeps two for each vector
    assert moments == pytest.approx(4 * wanted.moments, rel=few), found
    masters = sum(kinds["master"] for kinds in found)
    assert masters == pytest.approx(4 * (wanted.parameters + wanted.master), rel=0.02), found


@pytest.mark.processes
def test_ranks_hold_what_the_formula_says_in_every_combination(
    every_rank: list[dict[Any, dict[str, int]]],
) -> None:
    measured = [
        pair for found in every_rank for pair in found.items() if isinstance(pair[0], tuple)
    ]
    assert {case for case, _ in measured} == {(n, *case) for n in RANKS for case in CASES}
    for (ranks, stage, precision, kept, offload), kinds in measured:
        wanted = estimate(
            kinds["numel"],
            kinds["block"],
            ranks,
            stage,
            offload,
            precision=precision,
            grad_accum_dtype=kept,
            bucket_numel=BUCKET,
            device="cpu",
        )
        found = {kind: kinds.get(kind, 0) for kind in STATES}
        case = f"{ranks} ranks, stage {stage}, {precision}, {kept}, {offload}: {kinds}, {wanted}"
        gradients = wanted.gradients + wanted.accumulation
        assert found["gradients"] == pytest.approx(gradients, rel=0.02), case
        in_memory = wanted.device + wanted.host
        if offload == "nvme":
            least, most = 0.98 * in_memory, 1.05 * (in_memory + wanted.host_working)
            assert least <= sum(found.values()) <= most, case
        else:
            assert sum(found.values()) == pytest.approx(in_memory, rel=0.02), case
        assert kinds.get("buckets", 0) <= 1.1 * wanted.working, case
        assert kinds[OTHER] <= 12_000, case
