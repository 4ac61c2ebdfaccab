"""The tables of docs/scaling.md are the planner's, and agree with the papers."""

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
from zerolab.config.key_tables import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_tables_of_the_page_are_the_planners() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, TABLES) == text, "run: python -m benchmarks.scaling docs/scaling.md"
    assert all(f"<!-- {name} -->" in text for name in TABLES)


@pytest.mark.parametrize("place", ZERO, ids=str)
def test_model_states_are_those_of_the_paper(place: tuple[int, int]) -> None:
    stage, ranks = place
    for size, published in zip(ZERO_MODELS.values(), ZERO[place], strict=True):
        assert states(size, ranks, stage) / 1e9 == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("model", [*NARAYANAN, *KORTHIKANTI], ids=lambda model: model.name)
def test_the_published_models_have_as_many_parameters_as_their_names_say(model) -> None:  # type: ignore[no-untyped-def]
    number, unit = model.name.split()
    assert model.parameters == pytest.approx(float(number) * {"B": 1e9, "T": 1e12}[unit], rel=0.04)
    assert model.gpus == model.replicas * model.tensor * model.pipe


def test_published_speeds_and_times_agree_with_our_count_of_operations() -> None:
    petaflops = [one.gpus * one.teraflops / 1e3 for one in NARAYANAN]
    assert petaflops == pytest.approx([4.4, 8.8, 18.2, 34.6, 70.8, 143.8], rel=0.01)
    for one in KORTHIKANTI:
        share = one.model_flops / (one.gpus * one.fast_step_s * PEAK_FLOPS)
        assert share == pytest.approx(one.utilization, rel=0.01), one.name
        again = one.step_flops / (one.gpus * one.step_s * 1e12)
        assert 130 < again < 180, (one.name, again)  # beside 135 to 163 of the other paper


def test_sequence_parallelism_without_scores_keeps_a_fifth() -> None:
    for one in KORTHIKANTI:
        less = activations(one) / activations(one, fused=True, sequence_parallel=True)
        assert 4.5 < less < 6.5
