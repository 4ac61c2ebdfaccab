"""docs/concepts/scaling.md: its tables equal the planner's and agree with the papers."""

from pathlib import Path

import pytest

from benchmarks.scaling import (
    KORTHIKANTI,
    NARAYANAN,
    PEAK_FLOPS,
    TABLES,
    ZERO,
    ZERO_MODELS,
    activations,
    states,
)
from tools.key_tables import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "scaling.md"


def test_tables_equal_planner() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, TABLES) == text, (
        "run: python -m benchmarks.scaling docs/concepts/scaling.md"
    )
    assert all(f"<!-- {name} -->" in text for name in TABLES)


@pytest.mark.parametrize("layout", ZERO, ids=str)
def test_model_states_equal_zero_paper(layout: tuple[int, int]) -> None:
    stage, ranks = layout
    for size, published in zip(ZERO_MODELS.values(), ZERO[layout], strict=True):
        assert states(size, ranks, stage) / 1e9 == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("model", [*NARAYANAN, *KORTHIKANTI], ids=lambda model: model.name)
def test_parameter_counts_match_model_names(model) -> None:  # type: ignore[no-untyped-def]
    number, unit = model.name.split()
    assert model.parameters == pytest.approx(float(number) * {"B": 1e9, "T": 1e12}[unit], rel=0.04)
    assert model.gpus == model.replicas * model.tensor * model.pipe


def test_flop_counts_match_published_speeds() -> None:
    petaflops = [model.gpus * model.teraflops / 1e3 for model in NARAYANAN]
    assert petaflops == pytest.approx([4.4, 8.8, 18.2, 34.6, 70.8, 143.8], rel=0.01)
    for model in KORTHIKANTI:
        share = model.model_flops / (model.gpus * model.fast_step_s * PEAK_FLOPS)
        assert share == pytest.approx(model.utilization, rel=0.01), model.name
        teraflops = model.step_flops / (model.gpus * model.step_s * 1e12)
        assert 130 < teraflops < 180, (model.name, teraflops)  # 135 to 163 in the other paper


def test_sequence_parallelism_saves_four_fifths() -> None:
    for model in KORTHIKANTI:
        factor = activations(model) / activations(model, fused=True, sequence_parallel=True)
        assert 4.5 < factor < 6.5
