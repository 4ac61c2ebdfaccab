"""Unmodified Trainer script in a search: paused, resumed, compared at rungs, promoted."""

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.installation import Installation
from tests.waiting import until

SCRIPT = """
import os, pathlib, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers import set_seed

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}

class Hold(TrainerCallback):
    '''Waits after the second batch until the test has paused the experiment.'''

    def on_step_end(self, args, state, control, **kwargs):
        hold = pathlib.Path(os.environ["HOLD"])
        if state.global_step == 1 and hold.exists():
            hold.with_name(f"waits-{os.getpid()}").touch()
            import zerolab.core
            poller = zerolab.core.current().preempt._poller
            while poller.directive.action == "train":
                time.sleep(0.01)

set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2,
    bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments("out", per_device_train_batch_size=2, logging_steps=1, use_cpu=True,
    disable_tqdm=True, report_to=[], save_strategy="no", log_level="error")
trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(),
    callbacks=[Hold()])
trainer.train()
print("the script has come to its end", flush=True)
"""


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.slow  # transformers takes seven seconds to import, once for each of four or five runs
def test_trainer_script_pauses_and_is_promoted_like_a_trial_class(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    config = {
        "name": "trainer",
        "entrypoint": "python train.py",
        "hyperparameters": {
            "training_arguments": {
                "learning_rate": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
                "per_device_train_batch_size": 4,
            }
        },
        "searcher": {
            "name": "async_halving", "metric": "eval_loss", "max_trials": 2, "num_rungs": 2,
            "divisor": 2, "max_length": {"batches": 6}, "stop_once": False,
        },
        "resources": {"slots_per_trial": 1},
        "environment": {"environment_variables": [f"HOLD={hold}"]},
    }  # fmt: skip
    with Installation.running(tmp_path / "home", slots=2) as installation:
        client = installation.client
        number = installation.submit(tmp_path / "model", config, {"train.py": SCRIPT})

        def log_text() -> str:
            return "\n".join(installation.lines(number)[-40:])

        until("a trial waits", lambda: list(tmp_path.glob("waits-*")), details=log_text)
        client.experiment_action(number, "pause")
        installation.wait_for(number, "PAUSED")
        hold.unlink()
        client.experiment_action(number, "activate")
        assert installation.wait_for(number)["state"] == "COMPLETED", log_text()

        (bracket,) = client.searcher(number)["brackets"]
        assert [rung["length"] for rung in bracket["rungs"]] == [3, 6]
        low, top = ([entry["trial_id"] for entry in rung["entries"]] for rung in bracket["rungs"])
        assert len(low) == 2
        assert len(top) == 1
        for trial in client.trials(number):
            length = 6 if trial["id"] in top else 3
            assert (trial["state"], trial["restarts"]) == ("COMPLETED", 0), log_text()
            assert trial["steps_completed"] == length

            def points(group: str, name: str, of: Any = trial) -> list[Any]:
                curves = client.metrics(of["id"], group)
                return next(curve["points"] for curve in curves if curve["name"] == name)

            # Neither a gap nor a batch that was trained twice.
            assert [step for step, _ in points("training", "loss")] == list(range(1, length + 1))
            assert [step for step, _ in points("validation", "eval_loss")] == [3, 6][: length // 3]
            rate = trial["hparams"]["training_arguments"]["learning_rate"]
            assert points("training", "learning_rate")[0][1] == pytest.approx(rate)
            stored = [c["steps_completed"] for c in client.trial_checkpoints(trial["id"])]
            assert max(stored) == length
        assert (
            sum("the script has come to its end" in line for line in log_text().splitlines()) == 1
        )
