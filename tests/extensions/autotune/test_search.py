"""Search for the best candidate, over simulated runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from zerolab.errors import ConfigError
from zerotrial.extensions.autotune.candidates import (
    Candidate,
    Layout,
    LayoutEstimate,
    Profile,
    Space,
    ladder,
    make_space,
)
from zerotrial.extensions.autotune.journal import Journal
from zerotrial.extensions.autotune.search import Method, Metric, Result, Search

GB = 10**9


def make_profile(limit: float = 8, ranks: int = 4) -> Profile:
    """Profile of a model that needs 4 GB at stage 0 and less at higher ones."""
    needs = {0: 4.0, 1: 3.0, 2: 2.5, 3: 1.5}
    return Profile(
        parameters=1_000_000,
        largest_block=100_000,
        data_ranks=ranks,
        train_batch=64 * ranks,
        device="cpu",
        device_bytes=int(limit * GB),
        host_bytes=0,
        checkpointing=False,
        layouts=tuple(
            LayoutEstimate(Layout(stage), int(need * GB)) for stage, need in needs.items()
        ),
    )


class Machine:
    """Simulated runs: time and memory are functions of the candidate.

    Args:
        profile: Memory of layouts and the machine.
        noise: Relative deviations of the steps, in turn.
    """

    def __init__(self, profile: Profile, noise: tuple[float, ...] = (0.0,)) -> None:
        self.needs = {e.layout: e.device_bytes for e in profile.layouts}
        self.limit = profile.device_bytes
        self.noise = noise
        self.runs: list[tuple[Candidate, int, int]] = []

    def seconds(self, candidate: Candidate) -> float:
        """Duration of a step: an overhead per micro-batch, and communication per stage."""
        time = 1.0 + 0.05 * candidate.accumulation_steps + 0.1 * candidate.layout.stage
        time *= 1.3 if candidate.checkpointing else 1.0
        return time * (0.98 if candidate.bucket == 250_000 else 1.0)

    def memory(self, candidate: Candidate) -> int:
        """Bytes: those of the layout, and activations."""
        of_sample = 0.02 * GB if candidate.checkpointing else 0.1 * GB
        return self.needs[candidate.layout] + int(candidate.micro_batch * of_sample)

    def measure(self, candidate: Candidate, rung: int, steps: int, limit_s: float | None) -> Result:
        self.runs.append((candidate, rung, steps))
        if self.memory(candidate) > self.limit:
            return Result("out of memory", reason="out of memory")
        seconds = tuple(
            self.seconds(candidate) * (1 + self.noise[(len(self.runs) + i) % len(self.noise)])
            for i in range(steps)
        )
        if limit_s is not None and min(seconds) > limit_s:
            return Result("slow", seconds[:2], self.memory(candidate), "slow")
        return Result("measured", seconds, self.memory(candidate))

    def best_of_grid(self, space: Space) -> Candidate:
        candidates = [c for c in space.grid() if self.memory(c) <= self.limit]
        return min(candidates, key=self.seconds)


def run_search(
    profile: Profile, machine: Machine, metric: Metric = "throughput", method: Method = "guided"
) -> Search:
    search = Search(make_space(profile), profile, machine.measure, metric=metric, method=method)
    best = search.run()
    assert best is not None
    assert best.reason == "best"
    return search


def best_of(search: Search) -> Candidate:
    return next(c for c, entry in search.entries.items() if entry.reason == "best")


@pytest.mark.parametrize("limit", [100, 8, 5, 4.5, 3.7, 2.2])
def test_guided_search_equals_grid(limit: float) -> None:
    profile = make_profile(limit)
    machine = Machine(profile, noise=(0.0, 0.01, -0.01, 0.4, 0.0))
    search = run_search(profile, machine)
    best = machine.best_of_grid(make_space(profile))
    assert machine.seconds(best_of(search)) <= 1.03 * machine.seconds(best)
    assert len({candidate for candidate, _, _ in machine.runs}) <= len(search.entries) / 5


def test_candidates_are_measured_again_with_more_steps() -> None:
    profile = make_profile()
    machine = Machine(profile)
    run_search(profile, machine)
    by_rung = [[run for run in machine.runs if run[1] == rung] for rung in range(3)]
    assert [{steps for _, _, steps in runs} for runs in by_rung] == [{3}, {6}, {20}]
    assert len(by_rung[0]) > len(by_rung[1]) > len(by_rung[2]) >= 2
    assert {run[0] for run in by_rung[2]} <= {run[0] for run in by_rung[1]}


def test_survivors_are_not_stopped_early() -> None:
    """A machine that becomes slower during the search must not drop the best candidates."""
    profile = make_profile()
    machine = Machine(profile)

    def measure(candidate: Candidate, rung: int, steps: int, limit_s: float | None) -> Result:
        machine.noise = (3.0 * rung,)
        return machine.measure(candidate, rung, steps, limit_s)

    search = Search(make_space(profile), profile, measure)
    best = search.run()
    assert best is not None
    assert best.candidate == machine.best_of_grid(make_space(profile))
    assert len(best.results) == 3


def test_out_of_memory_drops_larger_candidates() -> None:
    profile = make_profile(limit=5)
    machine = Machine(profile)
    search = run_search(profile, machine, method="grid")
    failed = [e for e in search.entries.values() if e.status == "out of memory"]
    expected = [e for e in search.entries.values() if e.reason.startswith("out of memory expected")]
    assert failed
    assert expected
    assert all(machine.memory(entry.candidate) > machine.limit for entry in expected)
    assert all(not entry.results for entry in expected)


def test_planner_drops_layouts() -> None:
    profile = make_profile(limit=2.8)
    machine = Machine(profile)
    search = run_search(profile, machine)
    assert {candidate.layout.stage for candidate, _, _ in machine.runs} <= {2, 3}
    reasons = {e.reason for c, e in search.entries.items() if c.layout.stage < 2}
    assert reasons == {
        "planner: needs 4.0 GB without activations, of 2.8 GB",
        "planner: needs 3.0 GB without activations, of 2.8 GB",
    }


def test_every_candidate_has_a_reason() -> None:
    profile = make_profile()
    search = run_search(profile, Machine(profile))
    assert all(entry.reason for entry in search.entries.values())


def test_memory_metric_finds_least_memory() -> None:
    profile = make_profile()
    machine = Machine(profile)
    best = best_of(run_search(profile, machine, metric="memory"))
    assert (best.micro_batch, best.layout.stage, best.checkpointing) == (1, 3, True)


def test_failures_leave_no_best() -> None:
    profile = make_profile()
    runs = []

    def fail(candidate: Candidate, *_: object) -> Result:
        runs.append(candidate)
        return Result("failed", reason="ValueError: x")

    search = Search(make_space(profile), profile, fail, max_candidates=5)
    assert search.run() is None
    assert len(runs) == 5
    assert all(e.reason == "ValueError: x" for e in search.entries.values() if e.results)


def test_patience_ends_exploration() -> None:
    profile = make_profile()
    machine = Machine(profile)
    search = Search(make_space(profile), profile, machine.measure, patience=1)
    assert search.run() is not None
    reasons = [entry.reason for entry in search.entries.values()]
    assert "not measured: 1 candidates brought no improvement" in reasons


def test_search_continues_from_journal(tmp_path: Path) -> None:
    profile = make_profile()
    machine = Machine(profile, noise=(0.1, 0.0, -0.1))

    def journaled(journal: Journal, stop_after: int | None = None) -> Callable[..., Result]:
        def measure(candidate: Candidate, rung: int, steps: int, limit_s: float | None) -> Result:
            result = journal.result(candidate, rung)
            if result is None:
                if len(journal) == stop_after:
                    raise KeyboardInterrupt
                result = machine.measure(candidate, rung, steps, limit_s)
                journal.add(candidate, rung, result)
            return result

        return measure

    first = Journal(tmp_path, "settings")
    with pytest.raises(KeyboardInterrupt):
        Search(make_space(profile), profile, journaled(first, stop_after=7)).run()
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"candidate": {"micro')  # killed while it wrote
    second = Journal(tmp_path, "settings")
    assert len(second) == 7
    continued = Search(make_space(profile), profile, journaled(second))
    assert continued.run() is not None
    assert len(machine.runs) == len(second) == len(set(machine.runs))
    with pytest.raises(ConfigError, match="other settings"):
        Journal(tmp_path, "other settings")
    assert len(Journal(tmp_path, "other settings", restart=True)) == 0


def test_ladder_covers_batches_without_powers_of_two() -> None:
    assert ladder(1) == (1,)
    assert ladder(64) == (1, 2, 4, 8, 16, 32, 64)
    assert ladder(30, lowest=2) == (2, 5, 10, 30)
    assert ladder(7, lowest=2, highest=6) == ()
