"""Number of public names of the engine and its protocols."""

import pytest

import zerotrial
from tests.engine.models import TinyModel
from zerotrial.engine import protocols
from zerotrial.engine.engine import Engine

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
PROTOCOLS = protocols.Stage.__mro__[1:-3]


def public(names: list[str]) -> list[str]:
    return sorted({name for name in names if not name.startswith("_")})


def test_engine_has_fewer_than_30_names() -> None:
    engine, *_ = zerotrial.initialize(model=TinyModel(), config=CONFIG)
    names = public([*dir(Engine), *vars(engine)])
    assert len(names) < 30, names


@pytest.mark.needs_extension("pipeline")
def test_pipeline_engine_has_at_most_30_names() -> None:
    from zerotrial.extensions.pipeline.engine import PipelineEngine

    parts = ["module", "stage", "scaler", "lr_scheduler", "training_dataloader", "observer"]
    parts += ["config", "batch", "device", "mesh", "divided", "watchdog", "progress"]
    names = public([*dir(PipelineEngine), *parts, "checkpoint", "weights"])
    assert len(names) <= 30, names


@pytest.mark.needs_extension("deepspeed_api")
def test_initialize_adds_deepspeed_methods() -> None:
    engine, *_ = zerotrial.initialize(model=TinyModel(), config=CONFIG)
    assert isinstance(engine, Engine)
    for name in ("save_checkpoint", "get_lr", "zero_optimization_stage"):
        assert not hasattr(Engine, name)
        assert callable(getattr(engine, name))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_stage_protocol_has_at_most_10_members(protocol: type) -> None:
    members = public([*vars(protocol), *protocol.__annotations__])
    assert 0 < len(members) <= 10, members
