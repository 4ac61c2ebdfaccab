"""``from_pretrained`` at stage 3: the model is whole on rank 0 alone, until it is sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.compat.test_trainer import auto, become_rank, forget_accelerate
from tests.engine.ranks import run_on_ranks
from tests.engine.test_absent import peak_of
from zerotrial.compat.deepspeed import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FILE = {
    **auto(3),
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": False},
    "fp16": {"enabled": False},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def make_config() -> Any:
    from transformers import GPT2Config

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 8, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)


def rows(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 64, (2, 12), generator=generator)


def plain_losses(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = sum(model(input_ids=x, labels=x).loss for x in (rows(0, step), rows(1, step))) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(engine: Any) -> list[float]:
    losses = []
    for step in range(2):
        x = rows(dist.get_rank(), step)
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        every: list[Any] = [None, None]
        dist.all_gather_object(every, loss.item())
        losses.append(sum(every) / 2)
    return losses


def pretrained(root: str) -> dict[str, int]:
    become_rank()
    install()
    forget_accelerate()
    import deepspeed
    from transformers import GPT2LMHeadModel
    from transformers.integrations import HfDeepSpeedConfig

    torch.manual_seed(1)
    plain = GPT2LMHeadModel(make_config())
    if dist.get_rank() == 0:
        plain.save_pretrained(f"{root}/model")
    dist.barrier()
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    grown = GPT2LMHeadModel.from_pretrained(f"{root}/model")
    wanted = plain_losses(plain)
    alive = HfDeepSpeedConfig(FILE)
    assert alive.is_zero3()

    model = GPT2LMHeadModel.from_pretrained(f"{root}/model")
    assert all(p.is_meta for p in model.parameters()) is (dist.get_rank() > 0)
    engine, peak = peak_of(lambda: deepspeed.initialize(model=model, config=FILE)[0])
    assert losses_of(engine) == pytest.approx(wanted, rel=2e-6)
    engine.close()
    # one rank reads and another writes before there is an engine
    model = GPT2LMHeadModel.from_pretrained(f"{root}/model")
    weight = model.transformer.ln_f.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        assert weight.tolist() == [1.0] * 32
        if dist.get_rank() == 1:
            weight.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.tolist() == [0.5] * 32
    assert weight.is_meta is (dist.get_rank() > 0)
    assert model.transformer.ln_f.weight is weight
    grown.transformer.ln_f.weight.data.fill_(0.5)
    wanted_grown = plain_losses(grown)
    engine = deepspeed.initialize(model=model, config=FILE)[0]
    assert losses_of(engine) == pytest.approx(wanted_grown, rel=2e-6)
    engine.close()
    return {"whole": whole, "peak": peak}


def test_a_pretrained_model_is_whole_on_the_first_rank_alone(tmp_path: Path) -> None:
    _, second = run_on_ranks(pretrained, 2, str(tmp_path))
    assert 0.5 * second["whole"] <= second["peak"] < 0.8 * second["whole"], second
