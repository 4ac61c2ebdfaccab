"""Stages 0 to 2 train as one plain process does, at every number of ranks and precision."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerotrial
from tests.engine.models import Reference, TinyModel, batches_of_rank, config_of, loss_of
from tests.engine.ranks import run_on_ranks

pytestmark = pytest.mark.processes

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
TOLERANCES = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 5e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [
    ("fp32", (1, 0.0)),
    ("fp32", (3, 0.5)),
    ("bf16", (1, 0.5)),
    ("bf16", (3, 0.5)),
    ("fp16", (2, 0.5)),
]
"""Precision, accumulation steps and clipping."""

BUCKETS = [{"reduce_bucket_size": 400}, {"overlap_comm": False}]
STAGES = (0, 1, 2)
STEPS = 6

Key = tuple[int, str, tuple[int, float], int]


def train(
    stage: int, precision: str, window: tuple[int, float], zero: dict[str, Any]
) -> dict[str, Any]:
    """Train on this rank; losses are of the full batch."""
    single = not dist.is_initialized()
    rank, ranks = (0, 1) if single else (dist.get_rank(), dist.get_world_size())
    accumulation, clip = window
    torch.manual_seed(rank)  # rank 0's weights must win
    if rank == 0:
        torch.manual_seed(0)
    config = config_of(
        stage,
        ranks=ranks,
        accumulation=accumulation,
        clip=clip,
        zero=zero,
        **PRECISIONS[precision],
    )
    engine, *_ = zerotrial.initialize(model=TinyModel(), config=config)
    losses, norms = [], []
    total = 0.0
    for batch in batches_of_rank(rank, ranks, steps=STEPS, accumulation=accumulation):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        total += loss.item() / accumulation
        result = engine.step()
        if result.grad_norm is not None:
            losses.append(total)
            norms.append(result.grad_norm)
            total = 0.0
    everyone = torch.tensor(losses, dtype=torch.float64)
    if not single:
        dist.all_reduce(everyone)
    weights = {name: w.clone() for name, w in engine.stage.full_weights(torch.float32)}
    same = [p.detach().float().sum().item() for p in engine.module.parameters()]
    skipped = engine.skipped_steps
    engine.close()
    return {
        "losses": (everyone / ranks).tolist(),
        "norms": norms,
        "weights": weights,
        "published": same,
        "skipped": skipped,
    }


def every_case(ranks: int) -> list[Key]:
    """Both ways to cut buckets in fp32 on several ranks, one elsewhere."""
    return [
        (stage, precision, window, bucket)
        for stage, (precision, window) in itertools.product(STAGES, CASES)
        for bucket in range(2 if ranks > 1 and precision == "fp32" else 1)
    ]


def train_every_case(ranks: int) -> dict[Key, Any]:
    return {case: train(*case[:3], BUCKETS[case[3]]) for case in every_case(ranks)}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.soak), 4])
def test_stages_and_precisions_match_one_process(ranks: int) -> None:
    if ranks > 1:
        every_rank = run_on_ranks(train_every_case, ranks, ranks)
    else:
        every_rank = [train_every_case(1)]
    references = {
        (precision, window): Reference(
            steps=STEPS, accumulation=window[0], clip=window[1], dtype=DTYPES[precision]
        )
        for precision, window in CASES
    }
    for case in every_case(ranks):
        _, precision, window, _ = case
        actual, expected = every_rank[0][case], references[precision, window]
        tolerance = TOLERANCES[precision]
        assert actual["losses"] == pytest.approx(expected.losses, rel=tolerance), case
        # Each rank rounds its part of a batch to bf16, one process the full batch. Only losses,
        # which are averaged, are unaffected.
        more = 10 if precision == "bf16" else 1
        assert actual["norms"] == pytest.approx(expected.norms, rel=tolerance * more), case
        assert actual["skipped"] == 0
        for name, weight in expected.weights.items():
            gap = (actual["weights"][name] - weight).norm() / weight.norm()
            assert gap < tolerance * more, (case, name)
        for other in every_rank[1:]:
            assert other[case]["norms"] == actual["norms"], case
            assert other[case]["published"] == actual["published"], case
