"""The planner of layouts: what fits is listed, with traffic and bubble by the formulas."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from zerolab.config.engine.reader import load_engine_config
from zerolab.sizes import size_text
from zerotrial.engine.memory import block_activations
from zerotrial.plan.layouts import (
    bubble,
    data_traffic,
    find_layouts,
    pipe_traffic,
    reason,
    recommend,
    table,
    tensor_traffic,
)
from zerotrial.plan.noting import Noted, _note
from zerotrial.plan.plan import find_devices, main

EXAMPLE = Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "smoke.yaml"


@pytest.fixture(autouse=True)
def models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each example has a ``model_def`` of its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "model_def", raising=False)
    yield
    sys.modules.pop("model_def", None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)


def noted(blocks: int = 4, batch: int = 64, **more: Any) -> Noted:
    layers = nn.ModuleList(Block() for _ in range(blocks))
    model = nn.ModuleDict({"words": nn.Embedding(100, 64), "layers": layers})
    config = {
        "train_batch_size": batch,
        "gradient_accumulation_steps": 8,
        "bf16": {"enabled": True},
        **more,
    }
    return _note(model, load_engine_config(config), None, None)


def test_every_layout_of_8_ranks_is_there_once_and_multiplies_to_8() -> None:
    found = list(find_layouts(noted(), 8, "cuda", 512))
    sizes = {(one.pipe, one.data, one.tensor) for one in found}
    assert all(pipe * data * tensor == 8 for pipe, data, tensor in sizes)
    # Four blocks: no 8 pipeline stages.
    assert sizes == {
        (p, d, t) for p in (1, 2, 4) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * d * t == 8
    }
    assert len(found) == len({(one.pipe, one.data, one.tensor, one.stage) for one in found})
    assert all(one.stage < 3 for one in found if one.pipe > 1)
    assert all(one.stage == 0 for one in found if one.data == 1)


def test_a_batch_that_replicas_cannot_share_rules_layouts_out() -> None:
    found = list(find_layouts(noted(batch=16), 8, "cuda", 512))  # 8 micro-batches of 2 samples
    assert {one.data for one in found} == {1, 2}


def test_memory_falls_along_every_axis() -> None:
    found = {(o.pipe, o.data, o.tensor, o.stage): o for o in find_layouts(noted(), 8, "cuda", 512)}
    whole = found[1, 8, 1, 0].estimate.device
    assert found[1, 4, 2, 0].estimate.device < whole
    assert found[2, 4, 1, 0].estimate.device < whole
    assert found[1, 8, 1, 3].estimate.device < found[1, 8, 1, 2].estimate.device < whole


def test_pipeline_stages_compute_again_by_their_interval_alone() -> None:
    def activations(**more: Any) -> dict[tuple[int, int], int]:
        found = find_layouts(noted(**more), 4, "cuda", 512)
        return {(one.pipe, one.stage): one.activations for one in found if one.tensor == 1}

    plain, checkpointed = activations(), activations(activation_checkpointing={"enabled": True})
    assert checkpointed[1, 0] < plain[1, 0] / 2
    assert checkpointed[2, 0] == plain[2, 0]
    again = activations(pipeline={"activation_checkpoint_interval": 1})
    assert again[1, 0] == plain[1, 0]
    assert again[2, 0] < plain[2, 0] / 2
    assert again[4, 0] < plain[4, 0]
    # Two chunks a rank want four blocks on two stages, and eight on four.
    assert {pipe for pipe, _ in activations(pipeline={"schedule": "interleaved"})} == {1, 2}


def test_a_pipeline_of_several_stages_is_planned_without_its_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = EXAMPLE.parents[1] / "pipeline_gpt" / "experiment.yaml"
    assert main([str(file), "--tokens", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    layouts, now = found["layouts"], found["configured_layout"]
    assert found["configured"] is None  # its four ranks are stages, of one replica
    assert (now["pipe"], now["data"], now["tensor"], now["stage"]) == (4, 1, 1, 0)
    assert found["engines"][0]["largest_block"] == 12 * 64 * 64 + 9 * 64  # of a transformer
    assert {one["pipe"] for one in layouts} == {1, 2, 4}
    whole = {one["activations"] for one in layouts if one["pipe"] == one["tensor"] == 1}
    # Eight blocks, fp32 or 16 bits: what one block keeps is known.
    (bytes_,) = whole
    assert bytes_ in {8 * block_activations(512 * 64, width=width) for width in (2, 4)}


def test_a_layout_that_is_asked_for_and_is_not_in_the_table_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(EXAMPLE.parents[1] / "pipeline_gpt" / "experiment.yaml")
    assert main([file]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "as configured" in line)
    assert line.startswith("4 x 1 x 1             0 ")
    assert main([file, "--world-size", "2"]) == 0
    asked = "as configured, 4 pipeline stage(s) and matrices cut over 1 rank(s): "
    assert f"{asked}2 ranks are no multiple of 4 x 1" in capsys.readouterr().out.splitlines()
    assert main([file, "--gpu-memory", "0.0001"]) == 0
    text = capsys.readouterr().out
    assert "4 rank(s), with replicas alone, activations" in text
    assert "no layout of 4 ranks fits with its activations" in text


@pytest.mark.parametrize(("stages", "micro", "share"), [(1, 4, 0), (2, 1, 1 / 2), (4, 12, 1 / 5)])
def test_the_bubble_is_that_of_the_schedule(stages: int, micro: int, share: float) -> None:
    assert bubble(micro, stages) == pytest.approx(share)


def test_an_axis_of_one_rank_moves_nothing() -> None:
    assert data_traffic(1000, 3, 4, 1) == tensor_traffic(10, 2, 4, 1) == pipe_traffic(10, 4, 1) == 0


@pytest.mark.parametrize(
    ("stages", "chunks", "passes"), [(2, 1, 1), (4, 1, 2), (2, 2, 3), (4, 2, 4)]
)
def test_of_two_pipeline_stages_each_is_at_an_end(stages: int, chunks: int, passes: int) -> None:
    assert pipe_traffic(10, 4, stages, chunks) == passes * 40  # as `engine.traffic` counts
    assert [data_traffic(1000, stage, 4, 2) for stage in range(4)] == [2000, 2000, 5000, 12_000]


def test_the_cheapest_layout_is_recommended_unless_a_simpler_one_is_nearly_as_cheap() -> None:
    found = list(find_layouts(noted(), 8, "cuda", 512))
    best = recommend(found)
    assert best is not None
    least = min(one.traffic / (1 - one.bubble) for one in found)
    near = [one for one in found if one.traffic / (1 - one.bubble) <= 2 * least]
    assert best in near
    assert all((best.axes, best.cost) <= (one.axes, one.cost) for one in near)
    assert sum("recommended" in line for line in table(found, best, 2)) == 1
    assert recommend([]) is None
    # Of 8 tokens little moves between stages: replicas, which move weights, cost many times that.
    few = list(find_layouts(noted(), 8, "cuda", 8))
    staged = recommend(few)
    assert staged is not None
    assert staged.pipe > 1
    assert reason(best, found, 2).endswith("of those that fit, it moves the least in a step")
    assert "at stage 0: 4 x 1 x 2 moves less (" in reason(staged, few, 2)


def test_gpus_that_are_not_here_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(EXAMPLE), "--world-size", "8", "--gpu-memory", "80", "--tokens", "64"]) == 0
    text = capsys.readouterr().out
    assert "8 x GPU, as asked; a rank may use 80.0 GB, and 80.0 GB of the host" in text
    assert "recommended, with replicas alone: stage 0" in text
    assert text.splitlines()[-1].startswith("recommended: ")
    assert main([str(EXAMPLE), "--world-size", "2", "--gpu-memory", "0.0001"]) == 0
    text = capsys.readouterr().out
    assert "nothing fits" in text
    assert "no layout of 2 ranks fits with its activations" in text
    assert "say samples x length with --tokens" in text
    assert main([str(EXAMPLE), "--world-size", "2", "--json"]) == 0  # of one token, as it were
    found = json.loads(capsys.readouterr().out)["recommended_layout"]
    assert (found["pipe"], found["data"], found["tensor"]) == (1, 2, 1)


def test_ranks_that_cannot_all_be_replicas_get_the_layouts_whose_replicas_share_the_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [str(EXAMPLE), "--gpu-memory", "80", "--world-size"]
    assert main([*asked, "16"]) == 0  # 8 samples
    lines = capsys.readouterr().out.splitlines()
    (why,) = (line for line in lines if "must be a multiple" in line)
    assert why.startswith("not with 16 replicas: train_batch_size: ")
    (head,) = (line for line in lines if line.startswith("bytes of each"))
    assert "8 rank(s), with replicas alone (of 16, the most that can share the batch)" in head
    assert any(line.startswith("as configured, 1 pipeline stage(s)") for line in lines)
    assert main([str(EXAMPLE), "--world-size", "16"]) == 0  # on this machine, which ranks share
    here = find_devices(8, EXAMPLE)
    told = f"share the batch; by themselves each may use {size_text(here.device_bytes)})"
    assert (told in capsys.readouterr().out) == (here.kind == "cpu")
    assert main([*asked, "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_problem"] == why
    assert found["configured"] is found["configured_layout"] is None
    assert {one["world_size"] for one in found["choices"]} == {8}
    sizes = {(one["pipe"], one["data"], one["tensor"]) for one in found["layouts"]}
    assert {(1, 8, 2), (2, 4, 2)} <= sizes
    assert all(p * d * t == 16 and 8 % d == 0 for p, d, t in sizes)
    assert found["recommended_layout"]["data"] == 8  # nobody said what the other axes would move
    # Neither matrices nor 8 samples can be divided by 17, and there is one block.
    assert main([*asked, "17"]) == 2
    (head, problem) = capsys.readouterr().err.splitlines()
    assert head.endswith("smoke.yaml: 1 problem(s)")
    assert problem.startswith("  ds_config.json: train_batch_size: must be a multiple of ")


def test_the_command_lists_layouts_for_people_and_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(EXAMPLE), "--world-size", "4", "--tokens", "512"]) == 0
    text = capsys.readouterr().out
    assert "layouts of 4 ranks that fit" in text
    assert "2 x 2 x 1" in text
    assert main([str(EXAMPLE), "--world-size", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["batch_problem"] is None
    keys = {"pipe", "data", "tensor", "stage", "bubble", "traffic", "peak_device"}
    assert keys <= found["recommended_layout"].keys()
