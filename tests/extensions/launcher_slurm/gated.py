"""A trial that waits at certain batches until the test releases it, or it is preempted.

The same model and data train in plain torch, in one uninterrupted process.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrial
from zerolab.core.preemption import DirectivePoller

__all__ = ["Gated", "engine_config", "listen", "losses_of_plain_torch"]

RANKS, SAMPLES, LEARNING_RATE, CLIPPING = 4, 2, 0.02, 0.5
"""Ranks as planned; of a micro-batch; of AdamW; the largest norm of a gradient."""
_POLLERS: list[DirectivePoller] = []


def network() -> nn.Module:
    """The model, the same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> torch.utils.data.TensorDataset:
    """Return samples that do not fill a whole number of batches."""
    inputs = torch.randn(52, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def engine_config() -> dict[str, Any]:
    """Return the hyperparameter ``deepspeed_config`` of :class:`Gated`."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": 3},
    }


def losses_of_plain_torch(steps: int) -> list[float]:
    """Return the loss of each batch, trained in a single process."""
    model, (inputs, targets) = network(), data().tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    batch, losses = RANKS * SAMPLES, []
    per_epoch = math.ceil(len(inputs) / batch)
    for step in range(steps):
        first = step % per_epoch * batch
        rows = torch.arange(first, first + batch) % len(
            inputs
        )  # the last batch is completed from it
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        losses.append(loss.item())
    return losses


def listen() -> None:
    """Notify :class:`Gated` of a preemption, and let ranks agree on it after each batch."""
    import zerotrial.loop.controller
    import zerotrial.loop.session

    class Poller(DirectivePoller):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _POLLERS.append(self)

    zerotrial.loop.session.DirectivePoller = Poller  # type: ignore[misc]
    zerotrial.loop.controller._AGREEMENT_INTERVAL_S = 0.0


class Gated(zerotrial.ZeroTrial):
    """Trial whose first rank waits at gates; the others wait for it in a collective.

    At batch N it writes ``at_N`` into the folder of the hyperparameter ``gate``, with its run and
    the number of ranks, and waits for ``go_N``. Runs on fewer ranks than planned wait at the last
    gate, and after it, until they are preempted.
    """

    def __init__(self, context: zerotrial.ZeroTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.gate, self.gates = Path(hparams["gate"]), list(hparams["gates"])
        engine, *_ = zerotrial.initialize(model=network(), config=hparams["deepspeed_config"])
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        ranks = self.context.distributed
        if ranks.is_chief:
            self._stand(batch_idx, ranks.size)
        inputs, targets = next(dataloader_iter)
        loss = nn.functional.mse_loss(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def _stand(self, batch: int, ranks: int) -> None:
        fewer = ranks < RANKS and batch >= self.gates[-1]
        if batch not in self.gates and not fewer:
            return
        (self.gate / "now").write_text(f"{self.context.spec.run_id} {ranks}")
        (self.gate / "now").rename(self.gate / f"at_{batch}")
        while fewer or not (self.gate / f"go_{batch}").exists():
            if any(poller.should_preempt for poller in _POLLERS):
                return
            time.sleep(0.02)

    def evaluate_batch(self, dataloader_iter: Any) -> dict[str, Any]:
        inputs, targets = next(dataloader_iter)
        return {"loss": nn.functional.mse_loss(self.engine(inputs), targets)}

    def build_training_data_loader(self) -> Any:
        return zerotrial.DataLoader(data(), batch_size=SAMPLES)

    def build_validation_data_loader(self) -> Any:
        return zerotrial.DataLoader(data(), batch_size=13)
