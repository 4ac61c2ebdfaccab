"""Lightning's ``DeepSpeedStrategy`` on this engine, compared with plain torch and DDP."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.engine.ranks import run_on_ranks
from tests.extensions.huggingface.test_trainer import become_rank
from tests.libraries import folder_with
from zerotrial.extensions.deepspeed_api import install

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PACKAGES = ("lightning==2.6.6", "torchmetrics==1.9.0", "lightning-utilities==0.15.3")
SAMPLES, MICRO, STEPS, CLIP = 16, 2, 2, 0.5
"""Samples of an epoch and a micro-batch, micro-batches of an update, and the clipped norm."""


@pytest.fixture(scope="session")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(tmp_path_factory, PACKAGES)


def load(folder: str) -> None:
    sys.path.insert(0, folder)
    import lightning.pytorch  # noqa: F401


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def optimizer_of(model: nn.Module) -> tuple[Any, Any]:
    built = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return built, torch.optim.lr_scheduler.StepLR(built, step_size=2, gamma=0.5)


def plain(epochs: int) -> tuple[list[float], list[float]]:
    """In one process: losses of this rank's micro-batches, and of all samples after each epoch."""
    model, world = Net(), dist.get_world_size()
    optimizer, schedule = optimizer_of(model)
    losses, validations = [], []
    x, y = samples().tensors
    orders = [DistributedSampler(samples(), world, rank) for rank in range(world)]
    for epoch in range(epochs):
        for order in orders:
            order.set_epoch(epoch)
        parts = [torch.tensor(list(order)).split(MICRO) for order in orders]
        for batch in zip(*parts, strict=True):
            for rank, actual in enumerate(batch):
                loss = nn.functional.mse_loss(model(x[actual]), y[actual])
                (loss / world / STEPS).backward()
                if rank == dist.get_rank():
                    losses.append(loss.item())
            if len(losses) % STEPS == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        with torch.no_grad():
            validations.append(nn.functional.mse_loss(model(x), y).item())
    return losses, validations


def lightning_module() -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net()
            self.losses: list[float] = []
            self.validations: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("validation_loss", loss, sync_dist=True)

        def on_validation_epoch_end(self) -> None:
            self.validations.append(self.trainer.callback_metrics["validation_loss"].item())

        def configure_optimizers(self) -> Any:
            built, schedule = optimizer_of(self)
            return [built], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def make_trainer(root: str, stage: int, epochs: int) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DeepSpeedStrategy

    become_rank()
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DeepSpeedStrategy(stage=stage),
        callbacks=[ModelCheckpoint(root, "{epoch}", monitor="validation_loss", save_top_k=-1)],
        max_epochs=epochs,
        accumulate_grad_batches=STEPS,
        gradient_clip_val=CLIP,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=root,
    )


def with_fabric(root: str, stage: int) -> tuple[list[float], list[float]]:
    """Return losses of two epochs in a plain loop, and of the second epoch after a resume."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    config = {
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }
    actual = []
    for first in (0, 1):
        become_rank()
        strategy = DeepSpeedStrategy(config=dict(config))
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        net = Net()
        built, planned = optimizer_of(net)
        model, optimizer, schedule = fabric.setup(net, built, scheduler=planned)
        order = DistributedSampler(samples(), fabric.world_size, fabric.global_rank)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
        if first:
            fabric.load(f"{root}/fabric{stage}", state)
            assert state["epoch"] == first
        losses = []
        for epoch in range(first, 2):
            order.set_epoch(epoch)
            for x, y in DataLoader(samples(), MICRO, sampler=order):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss)
                optimizer.step()
                losses.append(loss.item())
            if epoch == 0:
                fabric.save(f"{root}/fabric{stage}", {**state, "epoch": 1})
        actual.append(losses)
    return actual[0], actual[1]


def loader() -> Any:
    return DataLoader(samples(), batch_size=MICRO)


def compare_with_plain(folder: str, root: str) -> int:
    install()
    load(folder)
    plain_losses, validated = plain(2)
    for stage in (0, 1, 2, 3):
        place = f"{root}/{stage}"
        full = lightning_module()
        trainer = make_trainer(place, stage, 2)
        trainer.fit(full, loader(), loader())
        assert trainer.global_step == len(plain_losses) // STEPS
        assert type(trainer.model).__name__ == "DeepSpeedEngine"
        assert trainer.model.zero_optimization_stage() == stage
        assert full.losses == pytest.approx(plain_losses, rel=1e-5), stage
        assert full.validations == pytest.approx(validated, rel=1e-5), stage
        rates = trainer.optimizers[0].param_groups[0]["lr"]
        # from the end of the first epoch, by other objects, to the bit
        resumed = lightning_module()
        trainer = make_trainer(f"{root}/resumed{stage}", stage, 2)
        trainer.fit(resumed, loader(), loader(), ckpt_path=f"{place}/epoch=0.ckpt")
        assert resumed.losses == full.losses[len(plain_losses) // 2 :]
        assert resumed.validations == full.validations[1:]
        assert resumed.hparams == {"width": 8}
        assert trainer.optimizers[0].param_groups[0]["lr"] == rates
        # without training: the engine has no optimizer then
        for again, path in ((resumed, None), (lightning_module(), f"{place}/epoch=0.ckpt")):
            other = make_trainer(root, stage, 2) if path else trainer
            (actual,) = other.validate(again, loader(), ckpt_path=path, verbose=False)
            expected = full.validations[0 if path else 1]
            assert actual["validation_loss"] == pytest.approx(expected, rel=1e-6), (stage, path)
        losses, second = with_fabric(root, stage)
        assert losses == pytest.approx(plain_losses, rel=1e-5), stage
        assert second == losses[len(plain_losses) // 2 :]
    return len(plain_losses)


def test_fit_validate_save_and_resume_match_plain_torch(lightning: str, tmp_path: Path) -> None:
    micro_batches = 2 * SAMPLES // MICRO // 2
    assert run_on_ranks(compare_with_plain, 2, lightning, str(tmp_path)) == [micro_batches] * 2
