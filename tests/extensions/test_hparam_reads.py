"""Warnings about searched hyperparameters that are never read."""

import argparse
import copy
import io
import json
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from zerolab.config import overwrite_deepspeed_config
from zerolab.contract.hparam_reads import (
    as_trial_hparams,
    note_read,
    read_unread,
    tracked,
    warn_of_unread,
)
from zerolab.contract.spec import RunSpec
from zerolab.extensions import hparam_reads

SPACE = {
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
    "width": 8,
    "optimizer": {"name": "sgd", "momentum": {"type": "double", "minval": 0, "maxval": 1}},
}
HPARAMS = {"lr": 0.1, "width": 8, "optimizer": {"name": "sgd", "momentum": 0.5}}


class AttrDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


def forget_reads() -> None:
    for notes in (hparam_reads._read, hparam_reads._forked, hparam_reads._flags):
        notes.clear()


@pytest.fixture(autouse=True)
def _reset_reads() -> Iterator[None]:
    forget_reads()
    yield
    forget_reads()


def not_called(_: Any) -> None:
    """Dummy for a script that never calls ``get_hparams``."""


def read_in_fork(hparams: Any) -> None:
    worker = multiprocessing.get_context("fork").Process(target=lambda: hparams["lr"])
    worker.start()
    worker.join()


def unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Callable[[Any], Any], **changes: Any
) -> list[str]:
    """Return the hyperparameters that are named in the warning after ``read``."""
    spec = RunSpec(
        experiment_id=1, trial_id=1, run_id=1,
        config={"hyperparameters": SPACE}, hparams=HPARAMS, trial_seed=1, slots=1,
        model_dir=str(tmp_path), run_dir=str(tmp_path), checkpoint_dir=str(tmp_path), **changes,
    )  # fmt: skip
    if read is not not_called:
        read(tracked(spec.hparams))
    warn_of_unread(spec)
    result = [record.getMessage() for record in caplog.records]
    return [name for name in ("lr", "optimizer.momentum") if any(f"'{name}'" in m for m in result)]


NOT_ALL: list[tuple[str, Callable[[Any], Any], list[str]]] = [
    ("nothing but a constant", lambda h: h["width"], ["lr", "optimizer.momentum"]),
    ("one", lambda h: h["lr"], ["optimizer.momentum"]),
    ("get", lambda h: h.get("lr"), ["optimizer.momentum"]),
    ("the block alone", lambda h: (h["lr"], h["optimizer"]["name"]), ["optimizer.momentum"]),
    ("a copy", lambda h: (h.copy()["optimizer"]["momentum"],), ["lr"]),
    ("a deep copy", lambda h: (copy.deepcopy(h)["optimizer"]["momentum"],), ["lr"]),
    ("nested in an AttrDict", lambda h: dict(AttrDict(h).optimizer, name="adam"), []),
    ("a forked worker", read_in_fork, ["optimizer.momentum"]),
    ("printed", lambda h: str(h) and h["width"], ["lr", "optimizer.momentum"]),
]
ALL: list[Callable[[Any], Any]] = [
    lambda h: (dict(**h), dict(**h["optimizer"])),
    lambda h: (dict(h), dict(h["optimizer"])),
    lambda h: ({**h}, {**h["optimizer"]}),
    lambda h: (AttrDict(h).lr, AttrDict(h["optimizer"]).momentum),
    json.dumps,
    yaml.safe_dump,
    yaml.dump,
    pickle.dumps,
    lambda h: (h | {}, {} | h["optimizer"]),
    lambda h: [(name, value, *dict(h["optimizer"]).items()) for name, value in h.items()],
    lambda h: ([*h.values()], [*h["optimizer"].values()]),
    lambda h: ([*h], sorted(h["optimizer"])),
    lambda h: [h[name] for name in h] + [h["optimizer"][name] for name in h["optimizer"]],
    lambda h: (argparse.Namespace(**h).lr, SimpleNamespace(**h["optimizer"]).momentum),
    lambda h: overwrite_deepspeed_config({}, {"optimizer": {"params": h["optimizer"]}}) and h["lr"],
    lambda h: "{lr}".format(**h) + "{momentum}".format(**h["optimizer"]),
    lambda h: ("lr" in h, h["optimizer"].pop("momentum")),
    lambda h: (AttrDict().update(h), AttrDict().update(h["optimizer"])),
    lambda h: (note_read("optimizer"), h.setdefault("lr", 1)),
]


@pytest.mark.parametrize(("how", "read", "expected"), NOT_ALL, ids=[how for how, *_ in NOT_ALL])
def test_unread_hyperparameter_is_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
    read: Callable[[Any], Any],
    expected: list[str],
) -> None:
    assert unread(tmp_path, caplog, read) == expected, how


@pytest.mark.parametrize("read", ALL, ids=map(str, range(len(ALL))))
def test_reading_whole_block_does_not_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Callable[[Any], Any]
) -> None:
    assert unread(tmp_path, caplog, read) == []


@pytest.mark.parametrize(
    ("source", "warned"),
    [
        ("import zerolab.core\nzerolab.core.init()\n", True),
        ("import zerolab.core, os, json\njson.load(open(os.environ['ZEROLAB_RUN_SPEC']))\n", False),
        ("import zerolab.core\nlr = context.info.hparams['lr']\n", False),
        ("print('reads nothing of ours')\n", False),
        (None, False),
    ],
)
def test_unread_hparams_warn_only_when_certain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str | None, warned: bool
) -> None:
    if source is not None:
        (tmp_path / "train.py").write_text(source)
    names = unread(tmp_path, caplog, not_called)
    assert bool(names) == warned


@pytest.mark.parametrize(
    ("source", "warned"),
    [
        ("hparams = context.train.get_hparams()\n", True),
        ("hparams = json.load(open(os.environ['ZEROLAB_RUN_SPEC']))['hparams']\n", False),
        ("lr = context.train.info.hparams['lr']\n", False),
    ],
)
def test_hparams_that_are_taken_and_not_used_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str, warned: bool
) -> None:
    (tmp_path / "train.py").write_text(f"import zerolab.core\n{source}")
    names = unread(tmp_path, caplog, lambda _: None)
    assert bool(names) == warned
    assert read_unread(tmp_path) == (names if warned else None)


def test_mistyped_hyperparameter_suggests_name(tmp_path: Path) -> None:
    hparams = tracked({"learning_rate": 0.1, "optimizer": {"momentum": 0.9}})
    with pytest.raises(KeyError, match="lerning_rate; did you mean 'learning_rate'"):
        hparams["lerning_rate"]
    with pytest.raises(KeyError, match="did you mean 'momentum'"):
        hparams["optimizer"]["momentun"]
    with pytest.raises(KeyError, match=r"^'width'$"):
        hparams["width"]


def test_tracked_hyperparameters_behave_as_a_dict(tmp_path: Path) -> None:
    hparams = tracked(HPARAMS)
    assert isinstance(hparams, dict)
    assert hparams == HPARAMS
    assert json.loads(json.dumps(hparams)) == HPARAMS
    assert yaml.safe_load(yaml.safe_dump(hparams)) == HPARAMS
    assert pickle.loads(pickle.dumps(hparams)) == HPARAMS
    hparams["optimizer"]["momentum"] = 0.9
    assert HPARAMS["optimizer"]["momentum"] == 0.5  # type: ignore[index]
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save({"hparams": hparams}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["hparams"]["lr"] == 0.1


def test_plain_mappings_where_omegaconf_is_installed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts no subclass of ``dict``."""
    monkeypatch.setattr(hparam_reads, "_has_omegaconf", lambda: True)
    plain = as_trial_hparams(tracked(HPARAMS))
    assert (type(plain), type(plain["optimizer"])) == (dict, dict)
    assert unread(tmp_path, caplog, lambda _: None) == []
    forget_reads()
    assert unread(tmp_path, caplog, lambda h: as_trial_hparams(h["lr"])) == ["optimizer.momentum"]


def test_no_warning_without_search_or_outside_experiment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = RunSpec(
        experiment_id=0, trial_id=0, run_id=0, config={"hyperparameters": SPACE}, hparams=HPARAMS,
        trial_seed=1, slots=1, model_dir=str(tmp_path), run_dir=str(tmp_path),
        checkpoint_dir=str(tmp_path),
    )  # fmt: skip
    tracked(spec.hparams)["width"]
    warn_of_unread(spec)
    assert not caplog.records
