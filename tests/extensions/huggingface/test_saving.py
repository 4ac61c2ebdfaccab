"""Files of ``save_pretrained`` and similar methods at stage 3."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import become_rank, forget_accelerate
from zerotrial.extensions.deepspeed_api import install

pytestmark = pytest.mark.processes


def small_t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1}
    return T5ForConditionalGeneration(T5Config(**sizes, num_heads=2, decoder_start_token_id=0))


def prepared(model: Any, stage: int) -> tuple[Any, Any]:
    """Train one step, as Accelerate's users do."""
    from accelerate import Accelerator, DeepSpeedPlugin

    forget_accelerate()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, zero3_save_16bit_model=True)
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, engine


def save(folder: str) -> bool:
    become_rank()
    install()
    from transformers import T5EncoderModel, T5ForConditionalGeneration

    from zerolab.errors import ConfigError
    from zerotrial.extensions.deepspeed_api import engine as compat_engine

    for stage in (3, 1):
        torch.manual_seed(0)
        accelerator, engine = prepared(small_t5(), stage)
        model, main = accelerator.unwrap_model(engine), accelerator.is_main_process
        path = f"{folder}/{stage}"
        model.save_pretrained(path, is_main_process=main, save_function=accelerator.save)
        if main or stage == 3:  # at stage 3 only rank 0 writes
            model.save_pretrained(f"{path}-main")
        full = engine.full_state_dict()
        state = accelerator.get_state_dict(engine)
        assert (state is None) == (stage == 3 and not main)
        model.save_pretrained(f"{path}-given", is_main_process=main, state_dict=state)
        accelerator.save_model(engine, f"{path}-accelerate")
        accelerator.wait_for_everyone()
        files = [load_file(f"{path}{end}/model.safetensors") for end in ("", "-main", "-given")]
        assert [len(file) for file in files] == [len(small_t5_file())] * 3
        back = T5ForConditionalGeneration.from_pretrained(path).state_dict()
        for name, value in full.items():
            torch.testing.assert_close(back[name], value)
        if stage == 3:
            model.encoder.save_pretrained(f"{path}-encoder")
            accelerator.wait_for_everyone()
            encoder = load_file(f"{path}-encoder/model.safetensors")
            torch.testing.assert_close(
                encoder["block.0.layer.0.SelfAttention.q.weight"],
                files[0]["encoder.block.0.layer.0.SelfAttention.q.weight"],
            )
            compat_engine.SAVING_TIMEOUT_S = 0.5
            if main:
                with pytest.raises(ConfigError, match=r"rank\(s\) 1 did not within 0.5 s; call it"):
                    model.save_pretrained(f"{path}-alone")
            accelerator.wait_for_everyone()
        engine.close()
    assert T5EncoderModel is not None
    return True


def small_t5_file() -> dict[str, Any]:
    """Return the tensors of a model file, which has tied weights once."""
    model = small_t5()
    return {id(value): name for name, value in model.named_parameters()}  # type: ignore[misc]


def test_save_pretrained_gathers_at_stage_3(tmp_path: Path) -> None:
    assert all(run_on_ranks(save, 2, str(tmp_path)))


def save_adapters(folder: str) -> bool:
    become_rank()
    install()
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q", "v"], modules_to_save=["lm_head"])
    base = small_t5()
    start = {name: value.clone() for name, value in base.state_dict().items()}
    accelerator, engine = prepared(get_peft_model(base, config), 3)
    full = engine.full_state_dict()
    if accelerator.is_main_process:  # small parameters are replicated: one rank may save them
        model = accelerator.unwrap_model(engine)
        model.save_pretrained(f"{folder}/alone")
        torch.save(get_peft_model_state_dict(model), f"{folder}/alone.pt")
    adapters = get_peft_model_state_dict(accelerator.unwrap_model(engine))
    assert any("lora_B" in name for name in adapters)
    assert any("lm_head" in name for name in adapters)
    engine.save_pretrained(folder)
    accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/adapter_model.safetensors")
    assert saved.keys() == adapters.keys()
    for options in (
        load_file(f"{folder}/alone/adapter_model.safetensors"),
        torch.load(f"{folder}/alone.pt", weights_only=True),
    ):
        assert options.keys() == saved.keys()
        for name, value in options.items():
            torch.testing.assert_close(value, saved[name])
    for name, value in saved.items():
        torch.testing.assert_close(adapters[name], value)
        assert value.abs().sum() > 0
    again = small_t5()
    again.load_state_dict(start)
    back = PeftModel.from_pretrained(again, folder).state_dict()
    for name, value in full.items():
        torch.testing.assert_close(back[name], value)
    engine.close()
    return True


def test_peft_saves_adapters_at_stage_3(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert all(run_on_ranks(save_adapters, 2, str(tmp_path)))
