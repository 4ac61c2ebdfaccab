"""Stage 3 of models built on the meta device, compared with plain torch."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zerotrial
from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, make_batches
from zerolab.errors import ConfigError

pytestmark = pytest.mark.processes

WIDTH, BLOCKS, STEPS = 32, 8, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


class Untied(Language):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, BLOCKS)
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)


def reset(part: nn.Module) -> None:
    make = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if make is not None:
        make()


def on_meta(kind: Any) -> Any:
    with torch.device("meta"):
        return kind()


def plain_losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for (ranks,) in make_batches(STEPS, 1, 2):
        loss = sum(model(*batch) for batch in ranks) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(engine: Any) -> list[float]:
    losses = []
    for (ranks,) in make_batches(STEPS, 1, 2):
        loss = engine(*ranks[engine.mesh.data.rank])
        engine.backward(loss)
        engine.step()
        every = [None, None]
        torch.distributed.all_gather_object(every, loss.item())
        losses.append(sum(every) / 2)  # type: ignore[arg-type]
    return losses


def peak_of(build: Any) -> tuple[Any, int]:
    """Return a call's result and the peak of bytes that torch allocated during it."""
    gc.collect()  # leftovers of closed engines must not be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        built = build()
    allocated = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return built, most


def build(kind: Any, **more: Any) -> Any:
    return zerotrial.initialize(model=kind(), config=CONFIG, **more)[0]


def all_cases(root: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(5)
    expected = Untied().apply(reset)
    stored = {name: value.clone() for name, value in expected.state_dict().items()}
    full = sum(value.nbytes for value in expected.state_dict().values())
    plain = plain_losses(expected)
    actual: dict[str, Any] = {"whole": full}
    if rank == 0:
        save_file(stored, f"{root}/all.safetensors")
    torch.distributed.barrier()

    def filled() -> Untied:
        model = Untied()
        model.load_state_dict(stored)
        return model

    ways: dict[str, Any] = {
        "filled": lambda: build(filled),
        "own": lambda: build(lambda: on_meta(Untied)),
        "files": lambda: build(lambda: on_meta(Untied), weights=f"{root}/all.safetensors"),
        "first": lambda: build(filled if rank == 0 else lambda: on_meta(Untied)),
    }
    for name, way in ways.items():
        torch.manual_seed(5)
        if name == "own":
            Untied()  # same random numbers as the plain one
        engine, actual[name] = peak_of(way)
        assert engine.module.scale.tolist() == [2.0, 2.0, 2.0]
        losses = losses_of(engine)
        assert losses == pytest.approx(plain, rel=2e-6), (name, losses, plain)
        if name == "files":
            engine.save_checkpoint(f"{root}/checkpoint")
            saved = engine.full_state_dict()
        engine.close()
    # a checkpoint fills a model that no rank had in full
    engine, actual["checkpoint"] = peak_of(lambda: build(lambda: on_meta(Untied)))
    engine.load_checkpoint(f"{root}/checkpoint")
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, saved[name], rtol=0, atol=0)
    engine.close()
    return actual


@pytest.mark.slow
def test_meta_model_matches_plain_and_is_never_full(
    tmp_path: Path,
) -> None:
    first, second = run_on_ranks(all_cases, 2, str(tmp_path))
    assert (
        first["filled"] > first["whole"] * 1.4
    )  # the measurement covers a full model and its shards
    # torch counts the mapped size; pages of a file may be released at any time.
    mapped = (tmp_path / "all.safetensors").stat().st_size
    for name, less in (("own", 0), ("files", mapped), ("checkpoint", 0)):
        assert max(first[name], second[name]) - less < 0.8 * first["whole"], name
    assert second["first"] < 0.8 * first["whole"] < first["whole"] <= first["first"]


class Bare(nn.Module):
    """Has nothing that would make its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        """Keep the weight unchanged."""


def refusals(root: str) -> list[str]:
    save_file({"inner.weight": torch.ones(4, 3), "other": torch.ones(1)}, f"{root}/bad.safetensors")
    reported = []
    for kind, stage, more in (
        (Bare, 3, {}),
        (Forgetful, 3, {}),
        (Bare, 2, {}),
        (Bare, 3, {"weights": f"{root}/bad.safetensors"}),
        (Bare, 3, {"weights": f"{root}/none.safetensors"}),
        (Bare, 1, {"weights": f"{root}/bad.safetensors"}),
    ):
        config = CONFIG | {"zero_optimization": {"stage": stage}}
        with pytest.raises(ConfigError) as caught:
            zerotrial.initialize(model=on_meta(kind), config=config, **more)
        reported.append(str(caught.value))
    return reported


def test_missing_values_are_listed_with_remedies(tmp_path: Path) -> None:
    (reported,) = run_on_ranks(refusals, 1, str(tmp_path))
    assert "weight (of Bare): must hold values" in reported[0]
    assert "give its module a reset_parameters(), or pass weights=" in reported[0]
    assert "the initialization of Forgetful must give weight values, gave none" in reported[1]
    assert "where zero_optimization.stage is 2" in reported[2]
    assert "weight, inner.weight, inner.bias" in reported[2]
    assert "inner.weight must have the shape (4, 4), got (4, 3)" in reported[3]
    assert "the model has no other" in reported[3]
    assert "must be safetensors that every rank can read" in reported[4]
    assert "weights: are read at stage 3" in reported[5]


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "weights" in record.getMessage():
            self.messages.append(record.getMessage())


def warnings_of(root: str) -> list[list[str]]:
    def tied() -> Language:  # its head is its embedding: files have one name of the two
        return Language(4, 1)

    stored = {name: value.clone() for name, value in tied().state_dict().items()}
    del stored["embed.weight"]
    ways = [
        (tied, stored),
        (
            lambda: on_meta(tied),
            {n: v for n, v in stored.items() if n not in {"blocks.0.down.bias", "head.weight"}},
        ),
        # buffers missing in the files are not logged
        (lambda: Untied(4), {n: v for n, v in Untied(4).state_dict().items() if n != "scale"}),
        (lambda: nn.Sequential(*[nn.Linear(1, 1) for _ in range(12)]), {"0.bias": torch.ones(1)}),
    ]
    reported = []
    for at, (kind, values) in enumerate(ways):
        file = f"{root}/{at}-{torch.distributed.get_rank()}.safetensors"
        save_file(values, file)
        heard = Heard()
        logging.getLogger("zerotrial").addHandler(heard)
        build(kind, weights=file).close()
        logging.getLogger("zerotrial").removeHandler(heard)
        reported.append(heard.messages)
    return reported


def test_parameters_missing_in_files_are_logged_once_on_rank_0(tmp_path: Path) -> None:
    first, second = run_on_ranks(warnings_of, 2, str(tmp_path))
    assert first[0] == first[2] == []
    assert "do not have embed.weight, blocks.0.down.bias; they keep" in first[1][0]
    assert "have 0.weight, 1.weight, 1.bias" in first[3][0]
    assert "5.weight, ... (23 in all); they keep" in first[3][0]
    assert [len(reported) for reported in first] == [0, 1, 0, 1]
    assert second == [[]] * 4
