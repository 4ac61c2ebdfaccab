"""Unmodified Hugging Face scripts as trials: recorded, interrupted, resumed."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.deepspeed_api.scripts import Trial, in_libraries
from zerolab.contract.spec import EXIT_PREEMPTED, EXIT_REACHED, EXIT_USER_ERROR, CheckpointRef

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 6

SCRIPT = """
import os, signal
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers import set_seed

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

class Accident(TrainerCallback):
    '''Sends this process a signal at its n-th event.'''

    def __init__(self):
        self.left = int(os.environ.get("EVENTS", 0))

    def happens(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and os.environ.get("RANK", "0") == os.environ.get("WHOSE", "0"):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))

    on_substep_end = on_step_begin = on_step_end = on_prediction_step = happens
    on_evaluate = on_save = on_log = on_epoch_end = happens

set_seed(1)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments("out", num_train_epochs=2, logging_steps=2, save_steps=2,
    per_device_train_batch_size=1, gradient_accumulation_steps=2, use_cpu="DS" not in os.environ,
    disable_tqdm=True, report_to=[], eval_strategy="steps", eval_steps=2, log_level="error",
    load_best_model_at_end=True, logging_nan_inf_filter=False)
trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(),
    callbacks=[Accident()])
trainer.train()
trainer.save_model("final")
trainer.evaluate()
"""

ARGUMENTS = {
    "learning_rate": 5e-3,
    "per_device_train_batch_size": 2,
    "max_steps": STEPS,
    "greater_is_better": True,
}
"""The largest loss is the best one, so that the best checkpoint is the first one."""


def outcome(trial: Trial, stage: int | None = None) -> dict[str, bytes]:
    """The model of the last run, and all of the trial's last checkpoint but its times."""
    assert trial.latest is not None
    assert trial.latest.steps_completed == STEPS
    stored = trial.path / "checkpoints" / trial.latest.uuid
    expected = ["model.safetensors"]
    if stage is None:
        expected += ["optimizer.pt", "scheduler.pt", "rng_state.pth"]
    else:
        expected += ["rng_state_0.pth", "rng_state_1.pth"]
    final = trial.run_path / "model" / "final" / "model.safetensors"
    return {"final": final.read_bytes(), **{n: (stored / n).read_bytes() for n in expected}}


def disturb(
    trial: Trial, dice: random.Random, times: int, before: int = 45, **common: str
) -> dict[int, Any]:
    """Kill and preempt a trial at random events, and let it end; return its losses by batch.

    Args:
        trial: Has not run yet.
        dice: Chooses the signal, the event and the rank.
        times: So often at most; the second one is a preemption.
        before: Number of an event of each run; all accidents happen earlier.
        common: Variables of every run.
    """
    losses: dict[int, Any] = {}
    for attempt in range(times + 1):
        name = "SIGTERM" if attempt == 1 else dice.choice(["SIGTERM", "SIGKILL"])
        events = {"EVENTS": str(dice.randrange(5, before)), "SIGNAL": name}
        whose = {"WHOSE": str(dice.randrange(trial.slots))}
        began = trial.latest.steps_completed if trial.latest else 0
        codes = trial.run(**common, **(events | whose if attempt < times else {}))
        reported = [
            (trial.run_path / f"log{rank}").read_text()[-1500:] for rank in range(trial.slots)
        ]
        preempted = set(codes) == {EXIT_PREEMPTED}
        assert preempted or -9 in codes or set(codes) == {0}, (codes, *reported)
        if preempted:
            assert trial.latest is not None
            assert trial.latest.steps_completed > began, "it makes progress"
        losses |= {
            step: values
            for step, values in trial.metrics("training").items()
            if step > began and "loss" in values
        }
        if set(codes) == {0}:
            return losses
    raise AssertionError((codes, *reported))


def losses_of(trial: Trial) -> dict[int, Any]:
    actual = trial.metrics("training").items()
    return {step: values["loss"] for step, values in actual if "loss" in values}


def disturb_one_rank(path: str) -> bool:
    calm = Trial(Path(path) / "calm", SCRIPT, {"training_arguments": ARGUMENTS})
    assert calm.run() == [0], (calm.run_path / "log0").read_text()
    first = losses_of(calm)
    assert list(first) == [2, 4, 6]
    early = Trial(Path(path) / "early", SCRIPT, {"training_arguments": ARGUMENTS})
    assert early.run(EVENTS="1", SIGNAL="SIGTERM") == [EXIT_PREEMPTED]  # before the first step
    reported = (early.run_path / "log0").read_text()
    assert "accelerator.save_state()" not in reported, "a Trainer leaves by itself"
    validations = calm.metrics("validation")
    assert list(validations) == [2, 4, 6]
    evaluated = [values["eval_loss"] for values in validations.values()]
    assert max(evaluated) == evaluated[0], "the best one is old"
    # once for each batch, not again for the script's final evaluation of the best model
    assert len([r for r in calm.records("metrics") if r["group"] == "validation"]) == 3
    assert [r["steps_completed"] for r in calm.records("checkpoint")] == [2, 4, 6]
    assert [r["value"] for r in calm.records("progress")][-1] == 1.0
    expected = outcome(calm)
    assert expected["final"] != expected["model.safetensors"]
    for seed in range(2):
        trial = Trial(Path(path) / f"seed{seed}", SCRIPT, {"training_arguments": ARGUMENTS})
        losses = disturb(trial, random.Random(seed), 4)
        assert outcome(trial) == expected, f"seed {seed}"
        assert losses[STEPS]["learning_rate"] == calm.metrics("training")[STEPS]["learning_rate"]
    # restarted after its last checkpoint, it trains no further batch
    assert calm.run() == [0], (calm.run_path / "log0").read_text()
    assert outcome(calm) == expected
    assert losses_of(calm) == {}
    # a rung: it validates, exits, and resumes
    batches = {"name": "single", "metric": "eval_loss", "max_length": {"batches": STEPS}}
    rates = {"training_arguments": {**ARGUMENTS, "save_strategy": "no"}}
    rung = Trial(Path(path) / "rung", SCRIPT.replace("load_best_model_at_end=True, ", ""),
                 rates, batches)  # fmt: skip
    assert rung.run(until=3) == [0], (rung.run_path / "log0").read_text()
    assert rung.reason().exit_code == EXIT_REACHED
    assert list(rung.metrics("validation")) == [2, 3]
    assert list(losses_of(rung)) == [2, 3]
    assert not (rung.run_path / "model" / "final").exists(), "the script has continued"
    assert rung.run() == [0]
    assert list(losses_of(rung)) == [4, 6]
    assert outcome(rung)["model.safetensors"] == expected["model.safetensors"]
    # another trial's weights, and nothing else of it
    start = CheckpointRef(calm.latest.uuid, 0, str(calm.path / "checkpoints"), warm_start=True)
    warm = Trial(Path(path) / "warm", SCRIPT, {"training_arguments": ARGUMENTS})
    assert warm.run(latest=start) == [0], (warm.run_path / "log0").read_text()
    assert list(losses_of(warm)) == [2, 4, 6]
    assert losses_of(warm) != first
    wider = SCRIPT.replace('"n_embd": 16', '"n_embd": 32')
    other = Trial(Path(path) / "other", wider, {"training_arguments": ARGUMENTS})
    assert other.run(latest=start) == [EXIT_USER_ERROR], (other.run_path / "log0").read_text()
    assert (
        "of its tensors have other shapes than the model's: size mismatch for "
        in other.reason().reason
    )
    assert other.reason().reason.endswith(" more")
    return True


def test_disturbed_trainer_ends_bitwise_equal(
    tmp_path: Path,
) -> None:
    assert in_libraries(disturb_one_rank, tmp_path)


def disturb_sharded(path: str) -> bool:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    file = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": zero,
    }  # fmt: skip
    hparams = {"training_arguments": {**ARGUMENTS, "deepspeed": file}}
    calm = Trial(Path(path) / "calm", SCRIPT, hparams, slots=2)
    assert calm.run(DS="1") == [0, 0], (calm.run_path / "log0").read_text()
    trial = Trial(Path(path) / "disturbed", SCRIPT, hparams, slots=2)
    # At one of the 13 events to the first save a rank is killed, then one is preempted: neither
    # run can reach its last event; an undisturbed run has 40.
    disturb(trial, random.Random(5), 2, before=14, DS="1")
    assert trial.runs == 3
    assert outcome(trial, 3) == outcome(calm, 3)
    return True


def test_disturbed_sharded_run_is_bitwise_equal(
    tmp_path: Path,
) -> None:
    assert in_libraries(disturb_sharded, tmp_path)


def is_standalone(path: str) -> bool:
    script = SCRIPT.replace("num_train_epochs=2", "max_steps=4")
    trial = Trial(Path(path) / "trainer", script.replace("report_to=[]", 'report_to="zerolab"'))
    assert trial.run_alone() == [0], (trial.run_path / "log0").read_text()
    assert list(losses_of(trial)) == [2, 4], "as far as the script says"
    assert list(trial.metrics("validation")) == [2, 4]
    assert trial.records("checkpoint") == []
    named = ACCELERATED.replace("cpu=True", "cpu=True, log_with='zerolab'")
    named = named.replace("first = 0", "first = 0; accelerator.init_trackers('mine', {'lr': 1.0})")
    loop = Trial(Path(path) / "loop", named)
    assert loop.run_alone() == [0], (loop.run_path / "log0").read_text()
    assert list(loop.metrics("training")) == list(range(1, 17))
    assert list(loop.metrics("validation")) == [4, 8, 12, 16]
    silent = Trial(Path(path) / "silent", script)
    assert silent.run_alone() == [0], (silent.run_path / "log0").read_text()
    assert not (silent.run_path / "metrics.jsonl").exists()
    return True


def test_standalone_script_is_recorded_on_request(tmp_path: Path) -> None:
    assert in_libraries(is_standalone, tmp_path)


def refused(path: str) -> bool:
    mistakes = {"learning_rat": 1e-3, "warmup_steps": True, "learning_rate": "fast",
                "num_train_epochs": 1, "max_steps": 3}  # fmt: skip
    searcher = {"name": "single", "metric": "eval_loss", "max_length": {"batches": 9}}
    trial = Trial(Path(path) / "bad", SCRIPT, {"training_arguments": mistakes}, searcher)
    assert trial.run() == [EXIT_USER_ERROR]
    reason = trial.reason().reason
    block = "hyperparameters.training_arguments"
    unknown = f"{block}.learning_rat: TrainingArguments has no such argument"
    assert f"{unknown}; did you mean 'learning_rate'?" in reason
    assert f"{block}.learning_rate: must be a number, got 'fast'" in reason
    assert f"{block}.warmup_steps: must be a number, got True" in reason or "whole number" in reason
    assert f"{block}.max_steps: must be the searcher's length, 9 batches, or be left out" in reason
    # errors of transformers itself: in the arguments, in the Trainer, before the first batch,
    # and after its first evaluation
    fragments = "accuracy", "trainer.train()", "'eval_accuracy', which is not"
    for name, value, line, reported in (
        ("deepspeed", "nowhere.json", "arguments = ", "existing deepspeed config"),
        ("optim", "adamm", "arguments = ", "adamm is not a valid OptimizerNames"),
        ("report_to", "nonsense", "trainer = ", "nonsense is not supported"),
        ("optim", "adamw_bnb_8bit", "trainer.train()", "bitsandbytes"),
        ("metric_for_best_model", *fragments),
        ("lr_scheduler_type", *fragments),  # it follows that metric
    ):
        arguments = {name: value}
        if name == "lr_scheduler_type":
            arguments = {name: "reduce_lr_on_plateau", "metric_for_best_model": value}
        wrong = Trial(Path(path) / name / value, SCRIPT, {"training_arguments": arguments})
        assert wrong.run() == [1], (wrong.run_path / "log0").read_text()
        actual = wrong.reason()
        assert actual.exit_code == EXIT_USER_ERROR, value
        assert actual.reason.startswith("script.py:"), actual.reason
        assert reported in actual.reason, actual.reason
        assert f"(in: {line}" in actual.reason, actual.reason
    derived = """
class Mine(Trainer):
    def __init__(self, *, max_seq_length, **given):
        super().__init__(**given)
trainer = Mine(rank=3, """
    parsed = """
from transformers import HfArgumentParser
words = ["--output_dir", "out", "--rate", "1", *os.environ.get("MORE", "").split()]
arguments, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
trainer = Trainer("""
    for name, instead, reported in (
        ("derived", derived, "required keyword-only argument: 'max_seq_length'"),
        ("parsed", parsed, "arguments are not used by the HfArgumentParser: ['--rate', '1']"),
    ):
        wrong = Trial(Path(path) / name, SCRIPT.replace("trainer = Trainer(", instead))
        assert wrong.run() == [1], (wrong.run_path / "log0").read_text()
        assert wrong.reason().exit_code == EXIT_USER_ERROR
        assert reported in wrong.reason().reason, wrong.reason().reason
    assert wrong.run(MORE="--lr 1") == [EXIT_USER_ERROR], "which says it in its last words"
    # a plain script's command line, and its own exit by the same code
    plain = """
import argparse, click, os, sys, typer
way = os.environ["WAY"]
def train(rate: float): pass
if way == "own":
    sys.exit(2)
elif way == "argparse":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float)
    parser.parse_args(["--rate", "fast"])
elif way == "click":
    click.command()(click.option("--rate", type=float)(train))(["--rate", "fast"])
else:
    sys.argv[1:] = ["a"]
    typer.run(train)
"""
    for way, code, reported in (
        ("own", 2, ""),
        ("argparse", EXIT_USER_ERROR, "error: argument --rate: invalid float value: 'fast'"),
        ("click", EXIT_USER_ERROR, "Invalid value for '--rate': 'fast' is not a valid float"),
        ("typer", EXIT_USER_ERROR, "Invalid value for"),
    ):
        wrong = Trial(Path(path) / way, plain)
        assert wrong.run(WAY=way) == [code], way
        reason = (wrong.run_path / "log0").read_text().strip()
        assert reported in reason, reason
    # a script that needs none continues, and its later failure may be temporary
    caught = SCRIPT.replace("trainer = Trainer(", "try: Trainer(model=3)\nexcept Exception: pass\n"
                            "trainer = Trainer(")  # fmt: skip
    caught = caught.replace("trainer.train()\n", "trainer.train()\nraise RuntimeError('later')\n")
    later = Trial(Path(path) / "later", caught, {"training_arguments": {"max_steps": 1}})
    assert later.run() == [1]
    assert "RuntimeError: later" in (later.run_path / "log0").read_text()
    assert later.reason() is None
    script = SCRIPT.replace("eval_dataset=Rows(),", "").replace("load_best_model_at_end=True,", "")
    script = script.replace('eval_strategy="steps", eval_steps=2,', "")
    searcher |= {"name": "async_halving", "max_trials": 2, "num_rungs": 2, "divisor": 3}
    blind = Trial(Path(path) / "blind", script, {}, searcher)
    assert blind.run() == [EXIT_USER_ERROR], (blind.run_path / "log0").read_text()
    assert "eval_dataset: must be given to the Trainer" in blind.reason().reason
    return True


def test_invalid_arguments_are_refused_by_name(tmp_path: Path) -> None:
    assert in_libraries(refused, tmp_path)


ACCELERATED = """
import os, signal
from pathlib import Path
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from safetensors.torch import save_file

set_seed(3)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(32, 4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
    batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
first = 0
found = sorted(Path("states").glob("epoch_*"))
if found:
    accelerator.load_state(str(found[-1]))
    first = int(found[-1].name.split("_")[1]) + 1
for epoch in range(first, 4):
    data.set_epoch(epoch)
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": loss.item()})
        if str(epoch) == os.environ.get("EPOCH"):
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    accelerator.log({"val_mse": loss.item(), "train/epoch": epoch}, step=(epoch + 1) * 4)
    accelerator.save_state(f"states/epoch_{epoch}")
save_file(accelerator.unwrap_model(model).state_dict(), "final.safetensors")
"""


def accelerated(path: str) -> bool:
    def final(trial: Trial) -> bytes:
        return (trial.run_path / "model" / "final.safetensors").read_bytes()

    calm = Trial(Path(path) / "calm", ACCELERATED)
    assert calm.run() == [0], (calm.run_path / "log0").read_text()
    assert list(calm.metrics("training")) == list(range(1, 17))
    assert [values["val_mse"] for values in calm.metrics("validation").values()]
    assert [r["steps_completed"] for r in calm.records("checkpoint")] == [4, 8, 12, 16]
    trial = Trial(Path(path) / "disturbed", ACCELERATED)
    assert trial.run(SIGNAL="SIGTERM", EPOCH="1") == [EXIT_PREEMPTED]
    reported = (trial.run_path / "log0").read_text()
    assert reported.count("it exits after the next accelerator.save_state()") == 1, reported
    assert trial.latest is not None
    assert trial.latest.steps_completed == 8
    assert trial.run(SIGNAL="SIGKILL", EPOCH="3") == [-9]
    assert min(trial.metrics("training")) == 9
    assert trial.run() == [0]
    assert final(trial) == final(calm)
    assert list(trial.metrics("training")) == [13, 14, 15, 16]
    assert trial.metrics("training")[16] == calm.metrics("training")[16]
    plugin = "__import__('accelerate').DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2)"
    on_engine = ACCELERATED.replace("cpu=True", f"deepspeed_plugin={plugin}")
    engine = Trial(Path(path) / "engine", on_engine)
    code = engine.run(SIGNAL="SIGTERM", EPOCH="1")
    reported = (engine.run_path / "log0").read_text()
    assert code == [EXIT_PREEMPTED], reported
    assert reported.count("it exits after the next accelerator.save_state()") == 1, reported
    assert list(engine.metrics("training")) == list(range(1, 9))
    assert list(engine.metrics("validation")) == [4, 8]
    assert [r["steps_completed"] for r in engine.records("checkpoint")] == [4, 8]
    return True


def test_accelerator_loop_leaves_when_saving_and_resumes(
    tmp_path: Path,
) -> None:
    assert in_libraries(accelerated, tmp_path)
