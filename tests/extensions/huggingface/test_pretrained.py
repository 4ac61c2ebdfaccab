"""``from_pretrained`` at stage 3: results as without DeepSpeed, one copy per host."""

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import (
    FP32,
    Rows,
    assert_alike,
    auto,
    become_rank,
    forget_accelerate,
    make_model,
    train,
)
from tests.extensions.meta_init.test_meta_init import Untied, peak_of
from zerolab.errors import ConfigError
from zerotrial.engine.memory.copy_on_write import is_copy_on_write
from zerotrial.extensions.deepspeed_api import install, shared_weights
from zerotrial.extensions.shared_memory import collectives

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


def large_config() -> Any:
    """Of 9.5 M weights, nearly all in blocks."""
    from transformers import GPT2Config

    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 256, "n_layer": 12, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)


def write_models(root: str) -> None:
    """Write the models on rank 0."""
    from safetensors.torch import save_file
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

    model = make_model()
    model.save_pretrained(f"{root}/one")
    model.save_pretrained(f"{root}/split", max_shard_size="8KB")
    assert len(json.loads(Path(f"{root}/split/model.safetensors.index.json").read_text())) > 1
    model.config.save_pretrained(f"{root}/bin")
    torch.save(model.state_dict(), f"{root}/bin/pytorch_model.bin")
    model.config.save_pretrained(f"{root}/more")
    values = {k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    del values["transformer.h.1.mlp.c_fc.weight"]
    save_file(values | {"other": torch.ones(2)}, f"{root}/more/model.safetensors", {"format": "pt"})
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=5)).save_pretrained(
        f"{root}/classes"
    )
    GPT2LMHeadModel(large_config()).to(torch.bfloat16).save_pretrained(f"{root}/large")


@contextlib.contextmanager
def log_messages(of: str = "transformers") -> Iterator[list[str]]:
    """Collect a logger's messages within a block."""
    import transformers

    transformers.logging.set_verbosity_warning()  # a Trainer may have changed it
    lines: list[str] = []
    logger = logging.getLogger(of)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def load_all(root: str) -> tuple[dict[str, Any], list[str]]:
    from transformers import AutoModelForCausalLM, GPT2ForSequenceClassification, GPT2LMHeadModel

    torch.manual_seed(dist.get_rank())  # random values differ
    with log_messages() as lines:
        actual = {
            "one": GPT2LMHeadModel.from_pretrained(f"{root}/one", low_cpu_mem_usage=True),
            "split": AutoModelForCausalLM.from_pretrained(f"{root}/split"),
            "bin": GPT2LMHeadModel.from_pretrained(f"{root}/bin"),
            "bf16": GPT2LMHeadModel.from_pretrained(f"{root}/one", torch_dtype=torch.bfloat16),
            "more": GPT2LMHeadModel.from_pretrained(f"{root}/more"),
            "head": GPT2ForSequenceClassification.from_pretrained(f"{root}/one", num_labels=3),
            "other": GPT2ForSequenceClassification.from_pretrained(
                f"{root}/classes", num_labels=3, ignore_mismatched_sizes=True
            ),
        }
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            GPT2ForSequenceClassification.from_pretrained(f"{root}/classes", num_labels=3)
    return actual, [re.sub(r"\s+", " ", line) for line in lines if "LOAD REPORT" in line]


MADE = ("score.weight", "transformer.h.1.mlp.c_fc.weight")
"""Parameters without values in some of the files."""


def compare(actual: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, model in actual.items():
        expected = plain[name].state_dict()
        values = model.state_dict()
        assert values.keys() == expected.keys()
        assert all(is_copy_on_write(parameter) for parameter in model.parameters()), name
        drawn = [key for key in MADE if key in values and name in {"more", "head", "other"}]
        for key in values.keys() - set(drawn):
            torch.testing.assert_close(values[key], expected[key], rtol=0, atol=0)
        for key in drawn:
            every: list[Any] = [None, None]
            dist.all_gather_object(every, values[key])
            torch.testing.assert_close(every[0], every[1], rtol=0, atol=0)
            assert values[key].std() == pytest.approx(0.02, rel=0.5)
        assert not model.training


def use_on_one_rank(model: Any, plain: Any, root: str) -> None:
    """Without an engine a model is a plain one, on one rank alone, too."""
    assert model.lm_head.weight is model.transformer.wte.weight
    if dist.get_rank() > 0:
        return
    rows = torch.stack([Rows()[index]["input_ids"] for index in range(4)])
    with torch.no_grad():
        assert model(input_ids=rows, labels=rows).loss == plain(input_ids=rows, labels=rows).loss
    options = {
        "attention_mask": torch.ones_like(rows),
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
        "num_beams": 2,
    }
    assert model.generate(rows, **options).tolist() == plain.generate(rows, **options).tolist()
    model(input_ids=rows, labels=rows).loss.backward()
    plain(input_ids=rows, labels=rows).loss.backward()
    torch.testing.assert_close(model.transformer.wpe.weight.grad, plain.transformer.wpe.weight.grad)
    model.zero_grad()
    model.save_pretrained(f"{root}/saved")
    model.to(torch.float64)
    torch.testing.assert_close(model.lm_head.weight.float(), plain.lm_head.weight)


def write_on_one_rank(model: Any) -> None:
    """A rank's writes are private; within GatheredParameters they reach all ranks."""
    import deepspeed

    weight = model.transformer.ln_f.weight
    with torch.no_grad():
        weight.fill_(2.0 + dist.get_rank())
    dist.barrier()
    assert weight.tolist() == [2.0 + dist.get_rank()] * 16
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        if dist.get_rank() == 1:
            weight.data.fill_(0.5)
    assert weight.tolist() == [0.5] * 16
    model.resize_token_embeddings(66)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, model.lm_head.weight.detach().clone())
    torch.testing.assert_close(every[0], every[1], rtol=0, atol=0)


def build_under_init(root: str) -> None:
    """Models built by a script or by transformers have rank 0's values."""
    import deepspeed
    from transformers import GPT2LMHeadModel

    nvme = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": root}}}
    with log_messages("zerotrial.extensions.deepspeed_api.init") as lines:
        for _ in range(2):
            with deepspeed.zero.Init(dtype=torch.bfloat16, config_dict_or_path=nvme):
                torch.nn.Linear(1, 1)
        with deepspeed.zero.Init(None, dist.group.WORLD, True, "cpu", False, FILE, None, True):
            pass
        with deepspeed.zero.Init(None, None, True, "nvme", True, None, None, False):
            pass
    assert [line.partition(":")[0] for line in lines] == [
        "zero.Init(remote_device='nvme')",
        "zero.Init(dtype=torch.bfloat16)",
    ]
    with log_messages("zerotrial.extensions.deepspeed_api.names.checkpointing") as lines:
        deepspeed.checkpointing.configure(None, partition_activations=False)
        deepspeed.checkpointing.configure(None, {}, True, profile=True)
    named = "deepspeed_config, partition_activations, profile: no effect here"
    assert [line.partition(";")[0] for line in lines] == [f"checkpointing.configure(): {named}"]
    with pytest.raises(ConfigError, match=r"absent\.json"):
        deepspeed.zero.Init(config_dict_or_path=f"{root}/absent.json").__enter__()
    torch.manual_seed(dist.get_rank())
    with deepspeed.zero.Init():
        built = Untied()
    torch.manual_seed(0)
    for actual, expected in zip(built.parameters(), Untied().parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert is_copy_on_write(actual)
    torch.manual_seed(dist.get_rank())
    with deepspeed.zero.Init():
        again = GPT2LMHeadModel.from_pretrained(f"{root}/one")
    torch.testing.assert_close(again.lm_head.weight, make_model().lm_head.weight, rtol=0, atol=0)
    torch.manual_seed(dist.get_rank())
    model = GPT2LMHeadModel._from_config(make_model().config)
    assert all(is_copy_on_write(parameter) for parameter in model.parameters())
    every: list[Any] = [None, None]
    dist.all_gather_object(every, model.state_dict())
    for name, value in every[0].items():
        torch.testing.assert_close(value, every[1][name], rtol=0, atol=0)
    assert model.state_dict()["transformer.wte.weight"].std() == pytest.approx(0.02, rel=0.2)


def anonymous() -> int:
    """Bytes of memory that are this process's alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def common() -> int:
    """Bytes of memory that this process has mapped, and that others may have, too."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split()
        if path and path[0].startswith("/memfd:"):
            begin, end = addresses.split("-")
            sizes[inode] = int(end, 16) - int(begin, 16)
    return sum(sizes.values())


def measure(root: str) -> dict[str, int]:
    """Return bytes of the model, after loading (one rank, one host), and the peaks of loading."""
    import deepspeed
    from transformers import GPT2LMHeadModel

    def load() -> Any:
        return GPT2LMHeadModel.from_pretrained(f"{root}/large", dtype=torch.float32)

    first = load()  # the process has returned its free memory by now
    before, shared = anonymous(), common()
    model = load()
    private, together = anonymous() - before, common() - shared
    assert model.dtype == torch.float32
    full = sum(value.nbytes for value in model.parameters())
    del first
    model, loading = peak_of(load)
    engine, building = peak_of(lambda: deepspeed.initialize(model=model, config=FILE)[0])
    engine.close()
    return {
        "whole": full,
        "held": private,
        "common": together,
        "loading": loading,
        "building": building,
    }


def as_on_two_hosts(root: str, plain: dict[str, Any]) -> dict[str, int]:
    """The ranks exchange different host names, and share nothing."""
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

    name = shared_weights.host_name
    shared_weights.host_name = collectives.host_name = lambda: f"host {dist.get_rank()}"
    shared_weights._known = None
    try:
        torch.manual_seed(dist.get_rank())
        head = GPT2ForSequenceClassification.from_pretrained(f"{root}/one", num_labels=3)
        split = GPT2LMHeadModel.from_pretrained(f"{root}/split")
        compare({"head": head, "split": split}, plain)
        write_on_one_rank(split)
        return measure(root)
    finally:
        shared_weights.host_name = collectives.host_name = name
        shared_weights._known = None


def all_cases(root: str) -> list[dict[str, int]]:
    become_rank()
    install()
    forget_accelerate()
    import deepspeed
    from transformers import GPT2LMHeadModel
    from transformers.integrations import HfDeepSpeedConfig

    if dist.get_rank() == 0:
        write_models(root)
    dist.barrier()
    plain, plain_lines = load_all(root)
    expected, _ = train(
        f"{root}/plain", None, model=GPT2LMHeadModel.from_pretrained(f"{root}/split")
    )
    alive = HfDeepSpeedConfig(auto(3) | FILE)
    assert alive.is_zero3()

    actual, lines = load_all(root)
    assert lines == plain_lines
    assert any("score.weight" in line for line in lines)
    compare(actual, plain)
    with pytest.raises(ConfigError, match="device_map: must be left out at stage 3"):
        GPT2LMHeadModel.from_pretrained(f"{root}/one", device_map="auto")
    use_on_one_rank(actual["one"], plain["one"], root)
    write_on_one_rank(actual["bin"])
    build_under_init(root)
    measured = [measure(root), as_on_two_hosts(root, plain)]
    losses, trainer = train(f"{root}/mine", auto(3), model=actual["split"])
    assert_alike(losses, expected, FP32)
    # after a training, and while its engine lives: a reference model
    reference = GPT2LMHeadModel.from_pretrained(f"{root}/one")
    frozen = deepspeed.initialize(
        model=reference, config={k: FILE[k] for k in FILE if k != "optimizer"}
    )[0]
    rows = Rows()[0]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(frozen(rows).logits, plain["split"](rows).logits)
    frozen.close()
    trainer.model_wrapped.close()
    return measured


def test_pretrained_model_is_the_plain_one_and_shared_by_a_host(
    tmp_path: Path,
) -> None:
    ranks = run_on_ranks(all_cases, 2, str(tmp_path))
    # torch counts the mapped size in bf16; pages that were read may be released.
    mapped = (tmp_path / "large" / "model.safetensors").stat().st_size
    for together, single in ranks:
        assert together["common"] >= together["whole"], ranks
        assert single["common"] < 0.2 * single["whole"], ranks
    for actual in itertools.chain(*ranks):
        assert actual["held"] < 0.2 * actual["whole"], ranks
        assert actual["loading"] - mapped < 0.2 * actual["whole"], ranks
        assert 0.5 * actual["whole"] < actual["building"] < 0.8 * actual["whole"], ranks
