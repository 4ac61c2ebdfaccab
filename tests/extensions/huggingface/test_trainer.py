"""Hugging Face's Trainer with ``deepspeed=``, compared with the plain one."""

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.engine.ranks import run_on_ranks
from zerolab.errors import ConfigError, EngineError
from zerotrial.extensions.deepspeed_api import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 4
KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss")


def auto(stage: int, **more: Any) -> dict[str, Any]:
    """A typical public configuration: the Trainer fills in values that it knows."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **more,
    }


OPTIMIZER = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 64, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def become_rank() -> None:
    """Environment variables of torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {"LOCAL_WORLD_SIZE": world, "ACCELERATE_USE_CPU": "false"}


def forget_accelerate() -> None:
    """Reset process state left by one training, such as the request for an engine."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def assert_plain(trainer: Any) -> None:
    """Check that the reference run used plain torch only."""
    assert not trainer.is_deepspeed_enabled
    assert type(trainer.model_wrapped) is DistributedDataParallel


def make_model(*, lora: bool = False) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(1)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))
    if lora:
        from peft import LoraConfig, get_peft_model

        expected = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
        model = get_peft_model(model, expected)
    return model


def make_trainer(folder: str, file: dict[str, Any] | None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    forget_accelerate()
    lora = more.pop("lora", False)
    model = more.pop("model", None)
    callbacks = more.pop("callbacks", None)
    more.setdefault("per_device_train_batch_size", 2)
    more.setdefault("max_steps", STEPS)
    arguments = TrainingArguments(
        folder,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        deepspeed=file,
        use_cpu=file is None,
        disable_tqdm=True,
        log_level="error",
        logging_nan_inf_filter=False,
        seed=1,
        **more,
    )
    return Trainer(
        model=make_model(lora=lora) if model is None else model,
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=callbacks,
    )


def train(folder: str, file: dict[str, Any] | None, resume: str | None = None, **more: Any) -> Any:
    trainer = make_trainer(folder, file, **more)
    trainer.train(resume_from_checkpoint=resume)
    if file is None:
        assert_plain(trainer)
    history = [{k: row[k] for k in KEPT if k in row} for row in trainer.state.log_history]
    return [row for row in history if row], trainer


def assert_alike(actual: Any, expected: Any, tolerance: float) -> None:
    assert len(actual) == len(expected)
    for row, other in zip(actual, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            assert value == pytest.approx(other[key], rel=tolerance, abs=1e-12), (key, row, other)


FP32 = 1e-6
"""Relative, of losses, norms, rates and evaluations: within 1e-7 of torch's, as it is of fp64's."""

BEST = {"load_best_model_at_end": True, "greater_is_better": True}
"""The largest loss is the best one, so that the best checkpoint is not the last."""


def all_cases(root: str) -> bool:
    become_rank()
    install()
    folder = lambda name: f"{root}/{name}"  # noqa: E731
    untrained = make_trainer(folder("untrained"), None).evaluate()["eval_loss"]
    plain, trainer = train(folder("plain"), None, **BEST)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    for stage in (0, 1, 2, 3):
        actual, trainer = train(folder(str(stage)), auto(stage), **BEST)
        assert_alike(actual, plain, FP32)
        assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
        for name, value in trainer.model_wrapped.full_state_dict().items():
            torch.testing.assert_close(value, best[name], rtol=0, atol=2e-6)
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder(f"final{stage}"))
        dist.barrier()
        check_saved(folder(f"final{stage}"), loss, trainer)
        trainer.model_wrapped.close()
    # resumed in the middle, at another stage
    actual, trainer = train(folder("resumed"), auto(1), resume=folder("3/checkpoint-2"))
    assert_alike(actual, plain, FP32)
    trainer.model_wrapped.close()
    # the optimizer and the schedule of the file; alike at all stages
    unsaved = {"save_strategy": "no"}
    ways = [train(folder(f"own{n}"), auto(n, **OPTIMIZER), **unsaved) for n in (0, 3)]
    assert_alike(ways[1][0], ways[0][0], FP32)
    assert ways[0][0][0]["learning_rate"] == 0
    for _, trainer in ways:
        trainer.model_wrapped.close()
    for more in (
        {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
        {"lora": True},
    ):
        expected, _ = train(folder("unsaved"), None, **more, **unsaved)
        for stage in (1, 3):
            actual, trainer = train(folder("unsaved"), auto(stage), **more, **unsaved)
            assert_alike(actual, expected, FP32)
            trainer.model_wrapped.close()
    in_sixteen_bits(root)
    cut_in_two(root)
    # without any training before it
    trainer = make_trainer(folder("evaluated"), auto(3))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(untrained, rel=FP32)
    return True


def in_sixteen_bits(root: str) -> None:
    """Compare a plain Trainer with ``autocast`` to bf16 with an engine whose model is bf16.

    ``autocast`` computes intermediate sums, norms and softmax in fp32. Gradients therefore differ
    even before averaging, and norms by up to 5e-3. Each norm equals, to the last bits of fp32, that
    of the exact mean of the gradients that its own arithmetic computes from its own weights.
    """
    expected, exact = train_and_compare_exact(f"{root}/plain-bf16", None)
    assert norms(expected) == pytest.approx(exact, rel=5e-7)
    for stage in (0, 2, 3):
        actual, exact = train_and_compare_exact(f"{root}/bf16-{stage}", auto(stage))
        assert norms(actual) == pytest.approx(exact, rel=5e-7)
        assert_alike(without_norms(actual), without_norms(expected), 2e-3)
        assert norms(actual) == pytest.approx(norms(expected), rel=2e-2)


def cut_in_two(root: str) -> None:
    """One model over both ranks, by DeepSpeed's key: as two replicas with half the batch each."""
    unsaved = {"save_strategy": "no"}
    halves, full = train(
        f"{root}/halves", None, model=make_llama(), per_device_train_batch_size=1, **unsaved
    )
    few = torch.utils.data.Subset(Rows(), range(14))
    expected = full.predict(few)
    for stage in (1, 3):
        file = auto(stage, tensor_parallel={"autotp_size": 2})
        actual, trainer = train(f"{root}/cut", file, model=make_llama(), **unsaved)
        assert_alike(actual, halves, 1e-5)
        assert trainer.model_wrapped.mesh.tensor.size == 2
        predicted = trainer.predict(few)  # each sample once, although both ranks process it
        assert (predicted.label_ids == expected.label_ids).all()
        assert predicted.metrics["test_loss"] == pytest.approx(
            expected.metrics["test_loss"], rel=1e-5
        )
        assert trainer.accelerator.gather_for_metrics(["a"], use_gather_object=True) == ["a"]
        trainer.save_model(f"{root}/cut{stage}")
        dist.barrier()
        saved = type(trainer.model).from_pretrained(f"{root}/cut{stage}").state_dict()
        for name, value in trainer.model_wrapped.full_state_dict().items():
            torch.testing.assert_close(saved[name], value)
        trainer.model_wrapped.close()


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def norms(history: Any) -> list[float]:
    return [row["grad_norm"] for row in history if "grad_norm" in row]


def without_norms(history: Any) -> list[dict[str, float]]:
    return [{key: row[key] for key in row if key != "grad_norm"} for row in history]


def train_and_compare_exact(folder: str, file: dict[str, Any] | None) -> tuple[Any, list[float]]:
    """Train in bf16; return the history, and by update the norm of its gradients' fp64 mean."""
    from transformers import TrainerCallback

    updates: list[tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]] = []

    class Look(TrainerCallback):
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            if file is not None:
                model = trainer.model_wrapped
                every: list[Any] = [{k: v.clone() for k, v in model.full_state_dict().items()}]
                dist.broadcast_object_list(every, 0)
                updates.append((every[0], []))
            else:
                updates.append(({k: v.clone() for k, v in model.state_dict().items()}, []))

    def note(model: Any, _: Any, inputs: dict[str, Any]) -> None:
        if model.training:
            updates[-1][1].append(dict(inputs))

    model = make_model()
    model.register_forward_pre_hook(note, with_kwargs=True)
    options = {"model": model, "bf16": True, "save_strategy": "no", "callbacks": [Look()]}
    trainer = make_trainer(folder, file, **options)
    trainer.train()
    if file is None:
        assert_plain(trainer)
    else:
        trainer.model_wrapped.close()
    history = [{k: row[k] for k in KEPT if k in row} for row in trainer.state.log_history]
    return [row for row in history if row], [
        exact_norm(*update, autocast=file is None) for update in updates
    ]


def exact_norm(weights: Any, inputs: list[dict[str, Any]], *, autocast: bool) -> float:
    """Of the mean over ranks of the sum over micro-batches, in fp64. **Collective**."""
    model = make_model()
    model.load_state_dict(weights)
    model = model.train() if autocast else model.train().bfloat16()
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for batch in inputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        model.zero_grad()
        (loss * dist.get_world_size()).backward()  # it has divided by all tokens of all ranks
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total.add_(parameter.grad)
    for total in sums:
        dist.all_reduce(total.div_(dist.get_world_size()))
    return float(torch.cat([total.flatten() for total in sums]).norm())


def check_saved(folder: str, loss: float, trainer: Any) -> None:
    from transformers import GPT2LMHeadModel

    again = GPT2LMHeadModel.from_pretrained(folder)
    rows = torch.stack([row["input_ids"] for row in map(Rows().__getitem__, range(32))])
    with torch.no_grad():
        actual = again.eval()(input_ids=rows, labels=rows).loss.item()
    assert actual == pytest.approx(loss, rel=0.2)  # the Trainer divides by all tokens
    stored = trainer.model_wrapped.full_state_dict()
    for name, value in stored.items():
        torch.testing.assert_close(again.state_dict()[name], value)


def test_trainer_script_matches_plain_torch_at_every_stage(tmp_path: Path) -> None:
    assert all(run_on_ranks(all_cases, 2, str(tmp_path)))


def inspect(_: str) -> dict[str, Any]:
    assert importlib.util.find_spec("deepspeed") is None
    install()
    install()
    import deepspeed
    import deepspeed.runtime.zero.partition_parameters as parts

    reported = {}
    for call in (
        lambda: importlib.import_module("deepspeed.moe.layer").MoE(1),
        lambda: deepspeed.utils.groups.get_data_parallel_group(None),
        lambda: deepspeed.init_inference(None),
    ):
        try:
            call()
        except (AttributeError, ConfigError, EngineError) as error:
            reported[type(error).__name__] = str(error)
    return {
        "version": importlib.metadata.version("deepspeed"),
        "finders": sum(type(finder).__name__ == "_Finder" for finder in sys.meta_path),
        "engine": deepspeed.DeepSpeedEngine.__mro__[1].__name__,
        "status": parts.ZeroParamStatus.AVAILABLE.name,
        "errors": reported,
    }


def test_module_explains_unsupported_names() -> None:
    (actual,) = run_on_ranks(inspect, 1, "")
    assert actual["version"] == "0.19.8"
    assert actual["finders"] == 1
    assert actual["engine"] == "Engine"
    assert actual["status"] == "AVAILABLE"
    assert "MoE layers are not supported" in actual["errors"]["EngineError"]
    assert "ranks and groups are torch.distributed's" in actual["errors"]["AttributeError"]
    assert "call the model under torch.no_grad()" in actual["errors"]["ConfigError"]
