"""Full tensors by name of a model with pipeline and tensor parallelism."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.pipelines import WIDTH, WORDS, batches, engine_of
from tests.engine.ranks import run_on_ranks
from zerolab.errors import EngineError

pytestmark = pytest.mark.processes

CUT = {"tensor_parallel": {"size": 2, "plan": {"layers.*.mix": "colwise_gather_output"}}}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2 stages x 2 replicas": (2, 1, {}),
    "2 stages x 2 cut": (2, 2, CUT),
    "4 stages": (4, 0, {}),
}
"""Pipeline stages, ZeRO stage, and what else the file says."""

TIED, FIRST, LAST = "layers.0.weight", "layers.1.mix.weight", "layers.6.mix.weight"


def course(engine: Any) -> dict[str, Any]:
    """Train, read, write, and train on."""
    engine.train_batch(batches(0, engine))
    read = {
        f"{n}/{k}": engine.full(n, k) for n in (TIED, FIRST, LAST) for k in ("weight", "exp_avg")
    }
    missing = engine.full(LAST, "gradient")
    generator = torch.Generator().manual_seed(5)
    for name, shape in {TIED: (WORDS, WIDTH), FIRST: (WIDTH,) * 2, LAST: (WIDTH,) * 2}.items():
        engine.set_full(name, torch.randn(shape, generator=generator) / 4)
        engine.set_full(name, torch.rand(shape, generator=generator) / 50, "exp_avg")
    with engine.gathered([TIED, "layers.1.norm.weight"], modifier_rank=0), torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name in {TIED, "layers.1.norm.weight"} and engine.mesh.data.rank == 0:
                parameter.add_(0.125 * (1 + engine.mesh.pipe.rank))  # the first stage's stay
    again = engine.full(TIED)
    losses = [float(engine.train_batch(batches(step, engine))) for step in (1, 2)]
    results = {"read": read, "nothing": missing, "tied": again, "losses": losses}
    results["whole"] = engine.full_state_dict()
    results["problems"] = [problem(engine, *call) for call in WRONG]
    results["losses"].append(float(engine.train_batch(batches(3, engine))))  # no harm is done
    engine.close()
    return results


WRONG: list[tuple[Any, ...]] = [
    ("layers.6.mix.wait",),
    (LAST, torch.zeros(3)),
    (FIRST, torch.zeros(WIDTH, WIDTH), "exp_average"),
    (TIED, torch.zeros(WORDS, WIDTH), "gradient"),
]


def problem(engine: Any, name: str, value: Tensor | None = None, kind: str = "weight") -> str:
    with pytest.raises(EngineError) as caught:
        engine.full(name) if value is None else engine.set_full(name, value, kind)
    return str(caught.value)


def every_layout() -> dict[str, Any]:
    return {
        name: course(engine_of(stages, stage, **more))
        for name, (stages, stage, more) in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return run_on_ranks(every_layout, 4)


@pytest.fixture(scope="module")
def single() -> Any:
    return course(engine_of(1, 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_tensors_of_any_stage_on_every_rank(four: list[Any], single: Any, layout: str) -> None:
    for rank, rank_result in enumerate(four):
        result = rank_result[layout]
        assert result["nothing"] is None
        torch.testing.assert_close(result["read"], single["read"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result["tied"], single["tied"], rtol=0, atol=1e-6)
        assert result["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert bool(result["whole"]) == (rank == 0)
    full = four[0][layout]["whole"]
    assert full.keys() == single["whole"].keys()
    torch.testing.assert_close(full, single["whole"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_error_is_raised_on_every_rank(four: list[Any], single: Any, layout: str) -> None:
    for rank_result in four:
        assert rank_result[layout]["problems"] == single["problems"]
    assert "'layers.6.mix.wait'; did you mean 'layers.6.mix.weight'?" in single["problems"][0]
    assert "must get a tensor (16, 16), got (3,)" in single["problems"][1]
