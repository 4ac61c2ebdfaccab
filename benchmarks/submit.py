"""Time from the submission of an experiment to its first trained batch, and to its end.

    python -m benchmarks.submit --rounds 5

An installation of its own is brought up in a temporary directory, and warm before the first round.
Both clocks begin before the experiment is sent. The goal: 3 s to the first batch on a CPU; 0.2 s of
ours for a run that does nothing. A table goes to stdout, and everything to
``benchmarks/results/submit.json``.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.cli.model import MODEL, experiment
from tests.end_to_end.installation import ENDED, Installation
from zerolab.client.archive import pack

RESULTS = Path(__file__).resolve().parent / "results" / "submit.json"
WARM_UP_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, metavar="S")
    options = parser.parse_args()
    rounds = options.rounds
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = place / "model"
        model.mkdir()
        (model / "model_def.py").write_text(MODEL)
        with Installation.running(place / "home", slots=4) as installation:
            time.sleep(options.warm_up)  # the fork server imports in the background
            results = {
                "1 rank": [_trial(installation, model, 1) for _ in range(rounds)],
                "2 ranks": [_trial(installation, model, 2) for _ in range(rounds)],
                "4 ranks": [_trial(installation, model, 4) for _ in range(rounds)],
                "a command that does nothing": [
                    _nothing(installation, model) for _ in range(rounds)
                ],
            }
    print(f"{'':32} {'first batch s':>14} {'end s':>8}")
    for case, found in results.items():
        first = [one["first_batch_s"] for one in found if one["first_batch_s"] is not None]
        shown = f"{statistics.median(first):.2f}" if first else ""
        end = statistics.median(one["end_s"] for one in found)
        print(f"{case:32} {shown:>14} {end:8.2f}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1))
    return 0


def _trial(installation: Installation, model: Path, slots: int) -> dict[str, Any]:
    return _run(installation, model, experiment(20, slots, scheduling_unit=1))


def _nothing(installation: Installation, model: Path) -> dict[str, Any]:
    return _run(installation, model, {**experiment(1), "entrypoint": "true"})


def _run(installation: Installation, model: Path, config: dict[str, Any]) -> dict[str, Any]:
    client = installation.client
    began = time.perf_counter()
    experiment_id = client.create_experiment(config, pack(model))["id"]
    first: float | None = None
    while True:
        if first is None and any(one["steps_completed"] for one in client.trials(experiment_id)):
            first = time.perf_counter() - began
        state = client.experiment(experiment_id)["state"]
        if state in ENDED:
            end = time.perf_counter() - began
            return {"first_batch_s": first, "end_s": end, "state": state}
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
