"""Memory of a rank: the estimate compared with measurements."""

import contextlib
import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from tests.engine.models import HAS_MUON, needs_muon
from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, make_batches
from zerolab.errors import ConfigError
from zerotrial.engine import initialize
from zerotrial.extensions.planner.formulas import WHOLE, Place, estimate, every_choice
from zerotrial.extensions.profiler.tensor_memory import OTHER, storage_bytes, tensor_bytes_by_kind

P = 1_000_000


@pytest.mark.parametrize("ranks", [1, 2, 4, 64])
def test_adam_in_16_bits_matches_table(ranks: int) -> None:
    per_parameter = [estimate(P, 0, ranks, stage).device / P for stage in range(4)]
    n = ranks
    assert per_parameter == pytest.approx([16, 4 + 12 / n, 2 + 14 / n, 16 / n], rel=1e-4)


def test_fp32_parameters_are_their_master() -> None:
    per_parameter = [estimate(P, 0, 4, stage, precision="fp32").device / P for stage in range(4)]
    assert per_parameter == pytest.approx([16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4])


def test_fp32_accumulation_costs_two_bytes_more() -> None:
    for stage, more in enumerate([2, 2, 2 / 4, 0]):
        plain, summed = (estimate(P, 0, 4, stage, grad_accum_dtype=t) for t in (None, "fp32"))
        assert summed.accumulation / P == pytest.approx(more)
        assert plain.accumulation == 0
        assert summed.device - summed.accumulation == plain.device
    narrow = estimate(P, 0, 4, 1, precision="fp32", grad_accum_dtype="bf16")
    assert (narrow.gradients, narrow.accumulation) == (2 * P, 0)


def test_offload_moves_all_bytes() -> None:
    for stage in (1, 2, 3):
        plain = estimate(P, 0, 4, stage)
        cpu = estimate(P, 0, 4, stage, offload_optimizer="cpu")
        nvme = estimate(P, 0, 4, stage, offload_optimizer="nvme")
        assert cpu.host == plain.master + plain.moments
        assert nvme.disk == plain.master + plain.moments
        on_device = plain.master if stage == 3 else 0  # gathered blocks stay on the device
        assert cpu.device == plain.device - cpu.host + on_device
        assert nvme.device == plain.device - nvme.disk + on_device
    in_place = estimate(P, 0, 4, 3, offload_optimizer="nvme", device="cpu")
    assert (in_place.disk, in_place.device) == (8 * P / 4, 8 * P / 4)
    everything = estimate(P, 0, 4, 3, offload_param="cpu")
    assert everything.device == 0
    assert everything.host == estimate(P, 0, 4, 3).device


def test_working_set_is_two_buckets_or_blocks() -> None:
    fp32: dict[str, Any] = {"precision": "fp32"}
    assert estimate(P, 0, 4, 1, **fp32).working == 0  # gradients are reduced in place
    assert estimate(P, 0, 4, 1, **fp32, communication_data_type="bf16").working == 2 * P
    assert estimate(P, 0, 4, 2, **fp32, bucket_numel=1000).working == 2 * 4 * 1000
    assert estimate(P, 0, 4, 2).working == 2 * P + 4 * P / 4  # one bucket has one buffer
    assert estimate(P, 1000, 4, 3).working == 1000 * (2 + 2 + 2 + 4)
    result = estimate(P, 1000, 4, 3)
    assert result.peak_device == result.device + result.working
    shared = estimate(P, 1000, 4, 3, device="cpu")
    assert shared.working == 1000 * (2 + 2 + 2 + 3 * 2) + 2 * P / 4


def test_gradients_are_widened_by_bucket() -> None:
    """Gradients are widened where the optimizer updates, in host memory if offloaded."""
    for stage, share in ((0, 1000), (1, 250), (2, 250)):
        plain = estimate(P, 0, 4, stage, bucket_numel=1000, grad_accum_dtype="fp32")
        widened = estimate(P, 0, 4, stage, bucket_numel=1000)
        assert widened.working - plain.working == 4 * share
    away = estimate(P, 0, 4, 1, "cpu", bucket_numel=1000)
    assert (away.working, away.host_working) == (0, (2 + 2) * P / 4 + 4 * 250)
    assert estimate(P, 0, 4, 1, optimizer="muon").working == 4 * P / 4


def test_ungathered_blocks_count_in_compute_type() -> None:
    plain, gathered = (estimate(P, 1000, 4, 3, kept_gathered=numel) for numel in (0, 7000))
    assert gathered.working - plain.working == 2 * 7000
    assert gathered.device == plain.device
    assert estimate(P, 1000, 4, 2, kept_gathered=7000) == estimate(P, 1000, 4, 2)


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_replicated_parameters_of_stage_3_are_on_the_device(offload: Place) -> None:
    states: Place = "none" if offload == "none" else "cpu"
    plain, stored = (
        estimate(P, 1000, 4, 3, states, offload, replicated=numel) for numel in (0, 7000)
    )
    assert stored.device - plain.device == stored.parameters - plain.parameters == 2 * 7000
    assert stored.working - plain.working == (2 + 4) * 7000
    assert (stored.host, stored.disk) == (plain.host, plain.disk)
    assert estimate(P, 1000, 4, 2, replicated=7000) == estimate(P, 1000, 4, 2)


def test_host_transfers_count_beside_states() -> None:
    cpu = estimate(P, 0, 4, 1, offload_optimizer="cpu", grad_accum_dtype="fp32")
    assert cpu.host_working == (4 + 2) * P / 4
    assert cpu.peak_host == cpu.host + cpu.host_working
    assert estimate(P, 0, 4, 1, offload_optimizer="cpu", device="cpu").host_working == 0
    nvme = estimate(P, 0, 4, 1, offload_optimizer="nvme", bucket_numel=1000)
    assert nvme.host_working == 4 * 1000 * 12 / 4
    assert estimate(P, 0, 4, 1, offload_optimizer="nvme").host_working == 12 * P / 4


def test_full_parameter_optimizers_copy_weights_at_stage_3() -> None:
    adam, lamb = (estimate(P, 0, 4, 3, optimizer=name) for name in ("adam", "lamb"))
    assert lamb.device - adam.device == 4 * P / 4
    assert estimate(P, 0, 4, 2, optimizer="lamb") == estimate(P, 0, 4, 2)


def test_invalid_arguments_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        estimate(P, 0, 0, 0, offload_optimizer="cpu", offload_param="cpu", optimizer="adm")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "world_size",
        "offload_optimizer",
        "offload_param",
        "optimizer",
    ]


def test_choices_are_complete() -> None:
    places: list[Place] = ["none", "cpu", "nvme"]
    possible = set()
    for stage, states, shards in itertools.product(range(4), places, places):
        with contextlib.suppress(ConfigError):
            possible.add(estimate(P, 1000, 8, stage, states, shards))
    without_states = {estimate(P, 1000, 8, 3, "none", device) for device in ("cpu", "nvme")}
    for choice in without_states:  # states are with the shards, or in host memory
        together = estimate(P, 1000, 8, 3, "cpu", choice.offload_param)
        assert replace(choice, offload_optimizer="cpu") == together
    choices = list(every_choice(P, 1000, 8))
    assert len(choices) == len(set(choices))
    assert set(choices) == possible - without_states


def test_shared_storage_counts_once() -> None:
    full = torch.zeros(1000)
    assert storage_bytes([full, full[10:], full.view(10, 100)]) == 4000
    counted = tensor_bytes_by_kind({"first": [full[:5]], "second": [full]})
    assert counted["first"] == 4000
    assert counted["second"] == 0
    stray = torch.zeros(50_000)
    assert tensor_bytes_by_kind({"first": [full]})[OTHER] >= storage_bytes([stray])


def test_fake_tensors_count_nothing() -> None:
    full = torch.zeros(1000)
    with FakeTensorMode():
        planned = torch.zeros(1000)
    assert storage_bytes([full, planned]) == 4000


PRECISIONS = ("fp32", "bf16", "fp16")
CASES = [
    (stage, precision, dtype, offload)
    for stage in range(4)
    for precision in PRECISIONS
    for dtype in ("fp32", "bf16")
    for offload in ("none", "cpu", "nvme")
    if stage or offload == "none"
]
"""Stage, precision, ``grad_accum_dtype``, where optimizer states are."""
CASES_BY_RANKS = {1: CASES, 2: CASES, 4: CASES[::5]}
"""On four ranks a fifth, with each value of each; all four processes run each of these cases."""

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

    Several process groups of one size divide the cases.
    """
    measured = {}
    measure_case(Replicas(1), directory, *CASES[-1])  # imports the modules of a run
    gc.collect()
    gc.freeze()  # existing objects are neither walked nor counted
    for ranks, cases in CASES_BY_RANKS.items():
        world = Replicas(ranks)
        for case in cases[world.index :: world.count]:
            measured[ranks, *case] = measure_case(world, directory, *case)
    for name in WHOLE - (set() if HAS_MUON else {"muon"}):
        measured[name] = measure_case(world, directory, 3, "bf16", "fp32", "none", name)
    return measured


def measure_case(
    world: Replicas,
    directory: str,
    stage: int,
    precision: str,
    accumulation: str,
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
        "data_types": {"grad_accum_dtype": accumulation},
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
    kinds = tensor_bytes_by_kind(engine.stage.tensors_by_kind())
    engine.close()
    block = sum(p.numel() for p in Language(width=16, blocks=1).blocks.parameters())
    return {"numel": numel, "block": block, **kinds}


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, int]]]:
    return run_on_ranks(measure, 4, str(tmp_path_factory.mktemp("states")))


@pytest.mark.processes
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=needs_muon if name == "muon" else ()) for name in sorted(WHOLE)],
)
def test_full_parameter_memory_matches_formula(
    every_rank: list[dict[Any, dict[str, int]]], optimizer: str
) -> None:
    sizes = [kinds[optimizer] for kinds in every_rank]
    expected = estimate(sizes[0]["numel"], 0, 4, 3, optimizer=optimizer, device="cpu")
    gradients = sum(kinds["gradients"] for kinds in sizes)
    assert gradients == pytest.approx(4 * expected.gradients, rel=0.02), sizes
    moments = sum(kinds["optimizer"] for kinds in sizes)
    few = 0.05 if optimizer == "muon" else 0.02  # Muon keeps two for each vector
    assert moments == pytest.approx(4 * expected.moments, rel=few), sizes
    masters = sum(kinds["master"] for kinds in sizes)
    assert masters == pytest.approx(4 * (expected.parameters + expected.master), rel=0.02), sizes


@pytest.mark.processes
def test_memory_matches_formula_in_all_combinations(
    every_rank: list[dict[Any, dict[str, int]]],
) -> None:
    measured = [
        pair for results in every_rank for pair in results.items() if isinstance(pair[0], tuple)
    ]
    expected_cases = {(n, *case) for n, cases in CASES_BY_RANKS.items() for case in cases}
    assert {case for case, _ in measured} == expected_cases
    for (ranks, stage, precision, accumulation, offload), kinds in measured:
        expected = estimate(
            kinds["numel"],
            kinds["block"],
            ranks,
            stage,
            offload,
            precision=precision,
            grad_accum_dtype=accumulation,
            bucket_numel=BUCKET,
            device="cpu",
        )
        results = {kind: kinds.get(kind, 0) for kind in STATES}
        case = f"{ranks} ranks, stage {stage}, {precision}, {accumulation}, {offload}"
        case += f": {kinds}, {expected}"
        gradients = expected.gradients + expected.accumulation
        assert results["gradients"] == pytest.approx(gradients, rel=0.02), case
        in_memory = expected.device + expected.host
        if offload == "nvme":
            least, most = 0.98 * in_memory, 1.05 * (in_memory + expected.host_working)
            assert least <= sum(results.values()) <= most, case
        else:
            assert sum(results.values()) == pytest.approx(in_memory, rel=0.02), case
        room = expected.working + expected.host_working
        assert kinds.get("buckets", 0) <= 1.1 * room, case
        assert kinds[OTHER] <= 12_000, case


WIDTH = 256
LAYER = WIDTH * WIDTH


def wide_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))


def measure_working_sets() -> dict[Any, int]:
    """Bytes of kind ``buckets`` after a step, by stage, precision and bucket size."""
    sizes = {}
    for stage, precision, bucket in itertools.product((0, 1, 2), ("fp32", "bf16"), (1, 3, 8)):
        zero = {"stage": stage, "reduce_bucket_size": bucket * LAYER}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": zero,
        }
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        engine, *_ = initialize(model=wide_model(), config=config)
        engine.backward(engine(torch.ones(2, WIDTH)).float().mean())
        engine.step()
        sizes[stage, precision, bucket] = storage_bytes(engine.stage.tensors_by_kind()["buckets"])
        engine.close()
    return sizes


def measure_full_blocks() -> dict[int, tuple[int, int]]:
    """Return bytes of replicated weights and of buffers by persistence threshold."""
    sizes = {}
    for threshold in (0, LAYER + 1):
        zero = {"stage": 3, "stage3_param_persistence_threshold": threshold}
        engine, *_ = initialize(
            model=wide_model(),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW"},
                "bf16": {"enabled": True},
                "zero_optimization": zero,
            },
        )
        engine.backward(engine(torch.ones(2, WIDTH)).float().mean())
        engine.step()
        replicated = [p for p in engine.module.parameters() if not isinstance(p, DTensor)]
        tensors = engine.stage.tensors_by_kind()
        assert storage_bytes(tensors["parameters"]) == storage_bytes(replicated)
        sizes[threshold] = storage_bytes(replicated), storage_bytes(tensors["buckets"])
        engine.close()
    return sizes


def measure_in_flight() -> tuple[dict[Any, int], dict[int, tuple[int, int]]]:
    return measure_working_sets(), measure_full_blocks()


@pytest.mark.processes
def test_working_set_matches_estimate() -> None:
    for buckets, blocks in run_on_ranks(measure_in_flight, 2):
        for (stage, precision, bucket), size in buckets.items():
            expected = estimate(
                8 * LAYER,
                LAYER,
                2,
                stage,
                precision=precision,
                bucket_numel=bucket * LAYER,
                device="cpu",
            )
            case = (stage, precision, bucket, size, expected.working)
            assert size == pytest.approx(expected.working, rel=0.02), case
        plain, stored = (
            estimate(8 * LAYER, LAYER, 2, 3, replicated=numel, device="cpu")
            for numel in (0, 8 * LAYER)
        )
        weights, buffers = (blocks[LAYER + 1][i] - blocks[0][i] for i in (0, 1))
        assert weights == stored.parameters - plain.parameters
        # Nothing is published, and no block is reduced, where all parameters are replicated.
        published, reduced, gradients = 2 * 4 * LAYER, 3 * 2 * LAYER, 2 * 8 * LAYER
        assert stored.working - plain.working == 4 * 8 * LAYER - published + gradients
        assert buffers == pytest.approx(4 * 8 * LAYER - published - reduced, rel=0.02)


def test_parameters_in_files_leave_moments_in_place() -> None:
    plain = estimate(P, 1000, 4, 3, "cpu", "cpu", "fp32")
    for states, moments in (("cpu", plain.moments), ("nvme", 0)):
        result = estimate(P, 1000, 4, 3, states, "nvme", "fp32")
        assert (result.device, result.host) == (0, moments)
        assert result.disk == plain.host - moments
    with pytest.raises(ConfigError, match="whole parameters"):
        estimate(P, 1000, 4, 3, "nvme", "nvme", optimizer="lamb")
