"""A loop on Accelerate as its users write it, with its DeepSpeed plugin on this engine."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    FP32,
    become_rank,
    forget_accelerate,
    make_model,
)
from zerotrial.extensions.deepspeed_api import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]


CLIP = 0.5
"""Below the norms of all updates."""


def loop(folder: str, stage: int | None) -> dict[str, Any]:
    """Train, evaluate, save everything in each of its ways, and go back."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers import GPT2LMHeadModel, get_linear_schedule_with_warmup

    forget_accelerate()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(stage is not None).lower()
    plugin = None
    if stage is not None:
        plugin = DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=2,
            gradient_clipping=CLIP,
            zero3_save_16bit_model=True,
        )
    accelerator = Accelerator(
        gradient_accumulation_steps=2, deepspeed_plugin=plugin, cpu=stage is None
    )
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids: Any = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0))
    batches: Any = torch.utils.data.DataLoader(ids, batch_size=2)
    held_out: Any = torch.utils.data.DataLoader(ids[:26], batch_size=2)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, 1, 8)
    model, optimizer, batches, held_out, schedule = accelerator.prepare(
        model, optimizer, batches, held_out, schedule
    )
    norms: list[float] = []

    def train(batch: Any) -> float:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return accelerator.reduce(loss.detach(), "mean").item()

    losses, seen = [train(batch) for batch in batches], 0
    model.eval()
    for batch in held_out:
        seen += len(accelerator.gather_for_metrics(batch))
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}/state")
    plain = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    plain.save_pretrained(
        f"{folder}/pretrained",
        is_main_process=accelerator.is_main_process,
        state_dict=weights,  # empty on the others
        save_function=accelerator.save,
    )
    accelerator.save_model(model, f"{folder}/model")
    if accelerator.is_main_process:
        plain.config.save_pretrained(f"{folder}/model")  # save_model writes weights alone
        plain.generation_config.save_pretrained(f"{folder}/model")
    model.train()
    further = [train(ids[:2]), train(ids[2:4])]
    accelerator.load_state(f"{folder}/state")
    back = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    if stage is not None:
        model.close()
    again: Any = GPT2LMHeadModel.from_pretrained(f"{folder}/pretrained")  # all ranks at stage 3
    reloaded: Any = GPT2LMHeadModel.from_pretrained(f"{folder}/model")
    with torch.no_grad():
        logits = reloaded.eval()(ids[:2]).logits
        assert torch.equal(logits, again.eval()(ids[:2]).logits)
    if dist.get_rank():
        return {}
    assert type(plain).__name__ == "GPT2LMHeadModel"
    assert Path(f"{folder}/model/model.safetensors").is_file()
    assert weights.keys() <= back.keys()  # save_pretrained takes tied names out
    assert all(torch.equal(value, back[name]) for name, value in weights.items())
    numbers = {"losses": losses + further, "norms": norms}
    return numbers | {"seen": seen, "weights": again.state_dict(), "logits": logits}


def without_sync(stage: int | None, *, apart: bool = False) -> list[float]:
    """Return losses with two micro-batches per update, the first inside ``no_sync``.

    On an engine ``step`` is called inside, too. With ``apart`` each micro-batch is an update.
    """
    from accelerate import Accelerator, DeepSpeedPlugin

    forget_accelerate()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(stage is not None).lower()
    plugin = None if stage is None else DeepSpeedPlugin(zero_stage=stage)
    accelerator = Accelerator(deepspeed_plugin=plugin, cpu=stage is None)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids: Any = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0))
    batches: Any = torch.utils.data.DataLoader(ids, batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for index, batch in enumerate(batches):
        with accelerator.no_sync(model) if index % 2 == 0 and not apart else nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss / 2)  # where DeepSpeed's engine steps, inside no_sync too
            if stage is not None or apart or index % 2:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
    if stage is not None:
        model.close()
    return losses


def every_stage(root: str) -> bool:
    become_rank()
    install()
    plain = loop(f"{root}/plain", None)
    for stage in (0, 1, 2, 3):
        actual = loop(f"{root}/{stage}", stage)
        for name in ("losses", "norms"):
            assert actual.get(name, []) == pytest.approx(plain.get(name, []), rel=FP32)
        assert actual.get("seen") == plain.get("seen")
        for name, value in actual.get("weights", {}).items():
            torch.testing.assert_close(value, plain["weights"][name], rtol=1e-4, atol=1e-6)
        if "logits" in actual:
            torch.testing.assert_close(actual["logits"], plain["logits"], rtol=1e-4, atol=1e-5)
    assert min(plain.get("norms", [1.0])) > CLIP, "all are clipped"
    together, apart = without_sync(None), without_sync(None, apart=True)
    assert together != apart
    for stage in (0, 1, 2, 3):  # at stages 2 and 3 Accelerate ignores no_sync
        expected = apart if stage > 1 else together
        assert without_sync(stage) == pytest.approx(expected, rel=FP32)
    return True


def test_accelerate_loop_matches_plain_torch_at_every_stage(
    tmp_path: Path,
) -> None:
    assert all(run_on_ranks(every_stage, 2, str(tmp_path)))
