"""``zerolab experiment preview`` without a server."""

import json
import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from statistics import median

import pytest
import yaml

from tests.end_to_end.installation import in_process
from zerolab.config import load_experiment
from zerolab.searcher import Continue, Create, Operation, Stop

DOCS = Path(__file__).parents[2] / "docs"
FILE = """
entrypoint: ["true"]
searcher:
  {name: adaptive_asha, metric: loss, divisor: 3, max_rungs: 10, max_trials: 10,
   max_concurrent_trials: 5, max_time: 900, time_metric: batches}
resources: {slots_per_trial: 2}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(FILE)
    return path


def preview(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return in_process(os.environ, "experiment", "preview", file, *options, expect=None)


def test_preview_shows_trials_and_cost(file: Path) -> None:
    output = preview(file, "--seconds-per-batch", "0.5").stdout
    assert "10 trials, compared after 100, 300, 900 batches" in output
    assert [line.split() for line in output.splitlines()[4:7]] == [
        ["100", "5"], ["300", "3"], ["900", "2"],
    ]  # fmt: skip
    assert "10 trials together train 3,200 batches, on 2 slots each" in output
    assert "If no trial is stopped early, they train 9,000 batches." in output
    assert "cost: 0.889 slot-hours, at most 2.5, at 0.5 s a batch" in output


STEPS = "metric: loss, time_metric: batches, max_trials: 8"
TABLES: dict[str, tuple[str, dict[int, int], str]] = {
    # Stopping at 4, 8, 16: half of 8 continue, half of these to the end.
    "async_halving": (f"num_rungs: 3, divisor: 2, max_time: 16, {STEPS}", {4: 4, 8: 2, 16: 2}, ""),
    # The 10th trains to the end; of the other 9, 5 begin at 1, 3 at 3 and 1 at 9. The best of these
    # 5 continues, so 4 are at 3. The best of them continues, so 2 are at 9, and none continues.
    "tpe_asha": ("metric: loss, max_length: 27, max_trials: 10", {1: 4, 3: 2, 9: 1, 27: 3}, ""),
    # Two of five end after each of the first two rounds, and copies begin: the copies end first.
    "pbt": (
        "metric: loss, population_size: 5, num_rounds: 3, length_per_round: {batches: 10}, "
        "replace_function: {truncate_fraction: 0.4}",
        {10: 6, 30: 3},
        "",
    ),
    "random": ("metric: loss, max_trials: 7, max_length: {epochs: 3}", {3: 7}, ""),
    "grid": (
        "metric: loss, max_length: 50",
        {50: 6},
        "{lr: {type: log, minval: -3, maxval: -1, count: 3}, "
        "kind: {type: categorical, vals: [a, b]}}",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_preview_matches_hand_count(tmp_path: Path, name: str) -> None:
    block, ends, space = TABLES[name]
    path = tmp_path / "experiment.yaml"
    path.write_text(
        f'entrypoint: ["true"]\nresources: {{slots_per_trial: 3}}\n'
        f"hyperparameters: {space or '{}'}\nsearcher: {{name: {name}, {block}}}\n"
    )
    unit = "epoch" if "epochs" in block else "batch"
    command = ("experiment", "preview", path, f"--seconds-per-{unit}", "120", "--json")
    estimate = json.loads(in_process(dict(os.environ), *command).stdout)
    assert {group["length"]: group["trials"] for group in estimate["lengths"]} == ends
    assert estimate["trials"] == sum(ends.values())
    total = sum(length * trials for length, trials in ends.items())
    assert estimate["total_length"] == total
    assert estimate["slot_hours"] == pytest.approx(3 * total / 30)
    most = max(ends) * sum(ends.values()) if name in {"async_halving", "tpe_asha"} else total
    assert estimate["most_length"] == most
    assert estimate["most_slot_hours"] == pytest.approx(3 * most / 30)


LR = {"lr": {"type": "double", "minval": 0, "maxval": 1}}


def trained_lengths(block: str, metric: Callable[[int], float]) -> tuple[int, int, int]:
    """Return the total length of a search with sequential trials, and the preview's numbers.

    Args:
        block: Block of a searcher that compares trials.
        metric: Metric of a trial by its number, for any length.

    Returns:
        The trained length, the previewed length with simultaneous trials, and the maximum.
    """
    content = {"entrypoint": ["true"], "hyperparameters": LR}
    section = load_experiment({**content, "searcher": yaml.safe_load(f"{{{block}}}")}).searcher
    searcher = section.make(LR, 0)
    progress: dict[int, int] = {}
    bounds: dict[int, int] = {}
    waiting: deque[int] = deque()

    def take(operations: Iterable[Operation]) -> None:
        for operation in operations:
            match operation:
                case Create(trial_id):
                    progress[trial_id], bounds[trial_id] = 0, section.length
                    waiting.append(trial_id)
                case Continue(trial_id, until):
                    bounds[trial_id] = until
                    if trial_id not in waiting:
                        waiting.append(trial_id)

    take(searcher.initial_operations())
    while waiting:
        trial_id = waiting.popleft()
        output: list[Operation] = []
        for length in section.validate_at():
            if progress[trial_id] < length <= bounds[trial_id] and Stop(trial_id) not in output:
                progress[trial_id] = length
                output += searcher.validation_completed(trial_id, metric(trial_id), length)
        if Stop(trial_id) in output or progress[trial_id] == section.length:
            output += searcher.trial_exited(trial_id)
        take(output)
    foretold = sum(length * trials for length, trials in section.forecast(LR).items())
    return sum(progress.values()), foretold, section.most_length(LR) or 0


HALVING = f"name: async_halving, num_rungs: 3, divisor: 2, max_time: 16, {STEPS}"
ADAPTIVE = (
    "name: adaptive_asha, metric: loss, divisor: 3, max_rungs: 10, max_trials: 10, max_time: 900, "
    "time_metric: batches"
)


@pytest.mark.parametrize(
    ("block", "better", "all_trained"),
    [
        # No trial is stopped; or the first is the best, and all others end at 4.
        (f"{HALVING}, max_concurrent_trials: 1", 1, 8 * 16),
        (f"{HALVING}, max_concurrent_trials: 1", -1, 16 + 7 * 4),
        # With promotion the first waits at 4 forever, the second at 8; or half of each rung
        # continues.
        (f"{HALVING}, stop_once: false, max_concurrent_trials: 1", 1, 4 + 8 + 6 * 16),
        (f"{HALVING}, stop_once: false, max_concurrent_trials: 1", -1, 4 * 4 + 2 * 8 + 2 * 16),
        # Brackets of 7 trials (100, 300, 900) and 3 (300, 900): all, or the first of each.
        (f"{ADAPTIVE}, max_concurrent_trials: 2", 1, 10 * 900),
        (f"{ADAPTIVE}, max_concurrent_trials: 2", -1, 2 * 900 + 6 * 100 + 2 * 300),
    ],
)
def test_sequential_trials_stay_below_maximum(block: str, better: int, all_trained: int) -> None:
    trained_by_all, foretold, most = trained_lengths(block, lambda trial_id: -better * trial_id)
    assert trained_by_all == all_trained <= most
    assert (trained_by_all > foretold) == (better > 0)


RUNGS = "num_rungs: 4, divisor: 3"
THIRTY = "metric: loss, max_trials: 30, max_length: {epochs: 27}, max_concurrent_trials: 2"


@pytest.mark.parametrize(
    ("claim", "block"),
    [
        ("`async_halving` trains 1.7 times", f"name: async_halving, {RUNGS}, {THIRTY}"),
        (
            "1.1 times with `stop_once: false`",
            f"name: async_halving, {RUNGS}, stop_once: false, {THIRTY}",
        ),
        ("`adaptive_asha` 1.6 times", f"name: adaptive_asha, divisor: 3, {THIRTY}"),
    ],
)
def test_random_order_promotes_documented_share(claim: str, block: str) -> None:
    ratios = []
    for seed in range(50):
        order = Random(seed).sample(range(31), 31)
        trained_by_all, foretold, _ = trained_lengths(block, order.__getitem__)
        ratios.append(trained_by_all / foretold)
    assert f"{median(ratios):.1f} times" in claim
    assert claim in (DOCS / "reference" / "cli.md").read_text().replace("\n", " ")


def test_cost_without_time_is_in_batches(file: Path) -> None:
    output = preview(file).stdout
    assert "cost: 6,400 batches on one slot, at most 18,000\n" in output
    assert "To get slot-hours, add --seconds-per-batch SECONDS" in output
    estimate = json.loads(preview(file, "--json").stdout)
    assert (estimate["total_length"], estimate["slot_hours"]) == (3200, None)


def test_open_length_has_no_cost(file: Path) -> None:
    file.write_text('entrypoint: ["true"]\nsearcher: {name: single, metric: loss}\n')
    done = preview(file)
    assert done.returncode == 0
    assert "1 trial that decides" in done.stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--seconds-per-epoch", "1"], "seconds_per_epoch: must be in the unit of the search"),
        (["--seconds-per-batch", "0"], "--seconds-per-batch: must be above 0, got 0"),
        (["--seconds-per-batch", "1", "--like", "3"], "--seconds-per-batch: cannot be combined"),
    ],
)
def test_invalid_option_is_one_message(file: Path, options: list[str], problem: str) -> None:
    done = preview(file, *options)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_invalid_file_names_key(file: Path) -> None:
    file.write_text(FILE.replace("max_trials: 10", "max_trials: 0"))
    done = preview(file)
    assert done.returncode == 2
    assert "searcher.max_trials: must be greater than 0" in done.stderr


def test_preview_accepts_folder(file: Path) -> None:
    assert preview(file.parent).stdout == preview(file).stdout != ""
    file.rename(file.with_name("other.yaml"))
    output = preview(file.parent)
    assert output.returncode == 2
    assert "must have an experiment.yaml" in output.stderr
