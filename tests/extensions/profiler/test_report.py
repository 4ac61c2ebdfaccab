"""Output of a training engine, which is silent by default."""

import csv
import itertools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.engine.ranks import run_on_ranks
from tests.engine.stage3_models import Language, make_batches
from tests.engine.test_native_engine import make_engine
from tests.engine.test_native_engine import train as train_natively
from zerotrial.engine import Engine, initialize
from zerotrial.engine.builder import build, config_log
from zerotrial.engine.protocols import NullObserver
from zerotrial.extensions.profiler.flops import PEAK_VARIABLE, count_flops
from zerotrial.extensions.profiler.progress_lines import StepObserver, count_tokens
from zerotrial.extensions.profiler.step_observer import ProfilingObserver
from zerotrial.extensions.profiler.timers import PhaseTimer

CPU = torch.device("cpu")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="zerotrial.engine")
    return caplog


def train(steps: int, config: dict[str, Any], *, micro: int = 2) -> Engine:
    torch.manual_seed(1)
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW"},
        **config,
    }
    engine, *_ = initialize(model=Language(), config=content)
    for step in make_batches(steps, micro, 1):
        for (batch,) in step:
            engine.backward(engine(*batch))
            engine.step()
    engine.close()
    return engine


def test_nothing_is_written_by_default(lines: pytest.LogCaptureFixture) -> None:
    engine = train(3, {})
    assert type(engine.observer) is NullObserver
    assert lines.messages == []
    assert not engine.module._forward_pre_hooks


def test_progress_line(lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "EXTENSIONS", {})
    monkeypatch.setattr(build, "_extended", {})
    parts = {"profiler": lambda config, device, _: StepObserver(config, device)}
    monkeypatch.setattr(config_log, "ENGINE_PARTS", parts)
    train_natively(make_engine(2, steps_per_print=2), 2, seed=1)
    line = r"step 2: loss [\d.]+, lr 0\.01, momentum 0\.9, gradient norm [\d.]+, skipped 0, "
    line += r"[\d,.]+ ms a step, [\d,.]+ samples/s"
    assert re.fullmatch(line, lines.messages[-1])


def test_progress_line_with_rates(
    lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PEAK_VARIABLE, "0.001")
    engine = train(5, {"steps_per_print": 2})
    progress = [line for line in lines.messages if line.startswith("step ")]
    assert [line.split(":")[0] for line in progress] == ["step 2", "step 4"]
    assert re.fullmatch(
        r"step 4: loss [\d.]+, lr 0\.001, momentum 0\.9, gradient norm [\d.]+, skipped 0, "
        r"[\d,.]+ ms a step, [\d,.]+ samples/s, [\d,]+ tokens/s, "
        r"[\d.]+ [kMG]?FLOP/s on each device, MFU [\d.]+%",
        progress[1],
    )
    rates = engine.observer.rates
    # Two micro-batches of two samples of six tokens make a step.
    assert rates["tokens_per_second"] == pytest.approx(6 * rates["samples_per_second"])
    assert rates["mfu"] == pytest.approx(rates["tflops"] / 0.001)


def test_rates_can_be_disabled(lines: pytest.LogCaptureFixture) -> None:
    off = {"steps_per_print": 2, "timers": {"throughput": {"enabled": False}}}
    observer = train(4, off).observer
    step = r"step \d: loss [\d.]+, lr 0\.001, momentum 0\.9, gradient norm [\d.]+, skipped 0, "
    step += r"[\d,.]+ ms a step"
    assert len(lines.messages) == 2
    assert all(re.fullmatch(step, line) for line in lines.messages)
    assert isinstance(observer, ProfilingObserver)
    assert observer.rates == {}
    assert observer._meter.flops == 0


def test_flops_of_forward_and_backward(lines: pytest.LogCaptureFixture) -> None:
    model, (((batch,),),) = Language(), make_batches(1, 1, 1)
    with count_flops() as so_far:
        model(*batch).backward()
        expected = so_far()
    observer = train(2, {"steps_per_print": 2}).observer
    assert isinstance(observer, ProfilingObserver)
    assert observer._meter.flops == 2 * expected
    again = train(2, {"steps_per_print": 2, "activation_checkpointing": {"enabled": True}})
    assert again.observer._meter.flops == pytest.approx(2 * expected, rel=0.05)


def test_fp16_line_has_loss_scale(lines: pytest.LogCaptureFixture) -> None:
    train(1, {"steps_per_print": 1, "fp16": {"enabled": True, "initial_scale_power": 8}})
    assert "loss scale 256" in lines.messages[-1]


def test_step_time_is_divided_into_phases(lines: pytest.LogCaptureFixture) -> None:
    train(4, {"steps_per_print": 2, "wall_clock_breakdown": True})
    breakdowns = [line for line in lines.messages if line.startswith("time of a step")]
    assert len(breakdowns) == 2
    for phase in ("input", "forward", "backward", "communication", "step", "between"):
        assert re.search(rf"{phase} [\d.]+ ms \(\d+%\)", breakdowns[1])
    total, *parts = (float(text) for text in re.findall(r"([\d.]+) ms", breakdowns[1]))
    assert sum(parts) == pytest.approx(total, rel=0.02, abs=0.05)


class Ticks:
    """A clock that is a second later each time it is looked at."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def mark(self) -> object:
        return next(self._ticks)

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)


def test_nested_phase_counts_for_itself() -> None:
    timer = PhaseTimer(CPU)
    timer._clock = Ticks()
    for _ in range(2):
        with timer.phase("outer"), timer.phase("inner"):
            pass
    assert timer.take() == {"outer": 2 * (3 - 1), "inner": 2 * 1}
    assert timer.take() == {}


def test_memory_by_kind(lines: pytest.LogCaptureFixture) -> None:
    train(2, {"memory_breakdown": True, "steps_per_print": 2, "bf16": {"enabled": True}})
    memory_lines = [line for line in lines.messages if line.startswith("memory")]
    assert [line.split(":")[0] for line in memory_lines] == ["memory at step 1", "memory at step 2"]
    for kind in ("parameters", "gradients", "master", "optimizer", "other", "process"):
        assert re.search(rf"{kind} [\d.]+ [kMG]?B", memory_lines[1])


@pytest.mark.parametrize("stage", [1, 3])
def test_step_profile_is_a_table_of_modules(lines: pytest.LogCaptureFixture, stage: int) -> None:
    profiler = {"enabled": True, "profile_step": 2, "module_depth": 2, "top_modules": 2}
    train(3, {"flops_profiler": profiler, "zero_optimization": {"stage": stage}})
    (table,) = [line for line in lines.messages if line.startswith("profile of")]
    assert "optimizer step 2" in table
    assert "9,760 parameters" in table
    assert "depth 2: blocks.0 (Block): 3,184 parameters" in table
    assert "depth 2: blocks.1" in table
    assert "depth 2: blocks.2" not in table
    assert "blocks.2 (Block)" in table
    assert "blocks.0.up" not in table


def test_step_profile_to_file(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "profile.txt"
    profiler = {"enabled": True, "output_file": str(target), "detailed": False}
    train(1, {"flops_profiler": profiler})
    text = target.read_text()
    assert "costliest modules" in text
    assert "share" not in text
    assert not any("costliest" in line for line in lines.messages)


def test_recomputed_forward_counts_in_backward(
    tmp_path: Path,
) -> None:
    titles = []
    for factor in (0.0, 1.0):
        target = tmp_path / f"{factor}.txt"
        profiler = {"enabled": True, "output_file": str(target), "recompute_fwd_factor": factor}
        train(1, {"flops_profiler": profiler})
        titles.append(target.read_text().splitlines()[0])
    forward, plain = _kflops(titles[0])
    assert _kflops(titles[1])[1] == pytest.approx(forward + plain, rel=0.01)


def _kflops(title: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) kFLOP", title)]


def test_resolved_config_names_sources(
    lines: pytest.LogCaptureFixture,
) -> None:
    zero = {"stage": 1, "reduce_bucket_size": 5e8, "contiguous_gradients": True}
    train(1, {"dump_state": True, "zero_optimization": zero})
    (text,) = [line for line in lines.messages if "on 1 ranks" in line]
    sources = dict(re.findall(r"^(\S+) = .*?\((\w+)", text, re.MULTILINE))
    assert sources["zero_optimization.stage"] == "file"
    assert sources["train_batch_size"] == "derived"
    assert sources["gradient_clipping"] == "default"
    assert sources["zero_optimization.reduce_bucket_size"] == "derived"  # clamped to the model
    assert sources["zero_optimization.contiguous_gradients"] == "hint"


def test_ineffective_keys_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Plain scripts show warnings without setting up logging."""
    zero = {
        "stage": 3,
        "stage3_module_granularity_threshold": 7,
        "contiguous_gradients": True,  # has no effect, as it is the default
        "allgather_partitions": False,
        "reduce_bucket_size": 1000,  # of other stages
        "zenflow": None,
    }
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "fp32_optimizer_states": True}}
    train(2, {"zero_optimization": zero, "optimizer": optimizer, "aio": {"queue_depth": 32}})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "engine config: accepted, without effect: optimizer.params.torch_adam, "
        "zero_optimization.reduce_bucket_size, zero_optimization.allgather_partitions, "
        "zero_optimization.stage3_module_granularity_threshold, aio.queue_depth; "
        "`zerolab config check` shows the reason"
    )


@pytest.mark.parametrize("top", [None, 0.05])
def test_default_that_replaces_the_learning_rate_is_warned_about(
    caplog: pytest.LogCaptureFixture, top: float | None
) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.05}}
    params = {"total_num_steps": 4} | ({} if top is None else {"warmup_max_lr": top})
    train(1, {"optimizer": optimizer, "scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert [record.getMessage() for record in caplog.records] == (
        []
        if top
        else [
            "engine config: scheduler.params.warmup_max_lr = 0.001 (default: replaces "
            'optimizer.params.lr 0.05; set warmup_max_lr to it, or to "auto")'
        ]
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_monitors_write_step_numbers(tmp_path: Path, stage: int) -> None:
    """In the layout of DeepSpeed: one CSV file for each name, events in the job's folder."""
    blocks = {
        name: {"enabled": True, "output_path": str(tmp_path / name), "job_name": "mine"}
        for name in ("tensorboard", "csv_monitor")
    }
    scheduler = {"type": "LinearWarmupLR", "params": {"warmup_num_steps": 4}}
    fp16 = {"enabled": True, "initial_scale_power": 4}
    more = {"scheduler": scheduler, "fp16": fp16, "zero_optimization": {"stage": stage}}
    engine = train(3, {**blocks, **more})
    samples = [4, 8, 12]
    columns: dict[str, list[float]] = {}
    for name in ("lr", "grad_norm", "loss_scale"):
        with (tmp_path / "csv_monitor" / "mine" / f"Train_Samples_{name}.csv").open() as file:
            head, *rows = csv.reader(file)
        assert head == ["step", name]
        assert [int(step) for step, _ in rows] == samples
        columns[name] = [float(value) for _, value in rows]
    # Written when the step has ended: the rate is that of the next one.
    assert columns["lr"] == pytest.approx([0.0005, 0.00075, 0.001])
    assert columns["loss_scale"] == [16.0] * 3
    assert columns["grad_norm"][-1] == pytest.approx(engine.get_global_grad_norm())
    events = EventAccumulator(str(tmp_path / "tensorboard" / "mine")).Reload()
    for name, values in columns.items():
        points = events.Scalars(f"Train/Samples/{name}")
        assert [point.step for point in points] == samples
        assert [point.value for point in points] == pytest.approx(values)


def write_on_ranks(directory: str) -> list[str]:
    engine = train(11, {"csv_monitor": {"enabled": True, "output_path": directory}})
    return [type(engine.observer).__name__]


@pytest.mark.processes
def test_only_rank_0_writes_monitors(tmp_path: Path) -> None:
    assert run_on_ranks(write_on_ranks, 2, str(tmp_path)) == [["Monitored"], ["NullObserver"]]
    file = tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv"
    assert len(file.read_text().splitlines()) == 12


def communication_lines(stage: int, comms: dict[str, Any]) -> list[str]:
    """Return the lines that rank 0 logs at step 10, without their prefix."""
    logger = logging.getLogger("zerotrial.engine")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    zero = {"stage": stage}
    train(10, {"comms_logger": {"enabled": True, **comms}, "zero_optimization": zero}, micro=1)
    logger.removeHandler(handler)
    return [line for line in seen if line.startswith("communication of a step")]


def communication_of_stages() -> dict[Any, list[str]]:
    cases = [(0, {}), (1, {}), (2, {}), (1, {"prof_all": False, "prof_ops": ["all_gather"]})]
    return {(stage, str(comms)): communication_lines(stage, comms) for stage, comms in cases}


@pytest.mark.processes
def test_comms_logger_counts_traffic() -> None:
    first, second = run_on_ranks(communication_of_stages, 2)
    assert not any(second.values())
    numel = sum(p.numel() for p in Language().parameters() if p.requires_grad)
    traffic = {
        case: dict(re.findall(r"(\w+) ([\d,]+)", line.partition(": ")[2]))
        for case, (line,) in first.items()
    }
    moved = {
        case: {name: int(count.replace(",", "")) for name, count in parts.items()}
        for case, parts in traffic.items()
    }
    expected = pytest.approx(numel, rel=0.02)
    assert moved[0, "{}"] == {"all_reduce": pytest.approx(2 * numel, rel=0.02)}
    assert moved[1, "{}"] == moved[2, "{}"] == {"reduce_scatter": expected, "all_gather": expected}
    (only,) = [parts for (_, comms), parts in moved.items() if "prof_ops" in comms]
    assert only == {"all_gather": expected}


def test_tokens_are_counted_in_first_integer_matrix() -> None:
    ids, mask = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.bool)
    assert count_tokens((ids, ids), {}) == 16
    assert count_tokens((), {"attention_mask": torch.ones(3, 3).long(), "input_ids": ids}) == 16
    assert count_tokens(({"x": ids},), {}) == 16
    assert count_tokens((torch.randn(2, 3, 4, 4), torch.zeros(2).long()), {}) == 0
    assert count_tokens((mask,), {}) == 0


def test_line_has_mean_loss(
    lines: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(1)
    optimizer = {"type": "SGD", "params": {"lr": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": optimizer,
        "steps_per_print": 2,
    }
    engine, *_ = initialize(model=Language(), config=config)
    means = []
    for step in make_batches(4, 2, 1):
        losses = []
        for (batch,) in step:
            losses.append(float(engine.backward(engine(*batch))))
            engine.step()
        means.append(sum(losses))
    engine.close()
    printed = [float(text) for text in re.findall(r"loss ([\d.]+)", "\n".join(lines.messages))]
    # The first step warms up, and is in no line.
    assert printed == pytest.approx([means[1], (means[2] + means[3]) / 2], rel=1e-4)
