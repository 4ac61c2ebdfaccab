"""Search for the best candidate: exploration with few steps, then successive halving."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from zerotrial.extensions.autotune.candidates import Candidate, Layout, Profile, Space

__all__ = ["Entry", "Method", "Metric", "Result", "Search"]

Metric = Literal["throughput", "latency", "memory"]
Method = Literal["guided", "grid", "random"]
Status = Literal["measured", "slow", "out of memory", "failed", "timed out"]

_FLAT = 1.03
"""A micro-batch this much slower than the best does not end a climb: timings are noisy."""
_CLOSE = 1.10
"""Layouts this much slower than the best are measured with more micro-batches."""
_TIE = 1.01
"""Ratio of step times below which memory decides."""
_ETA = 3
"""Reduction of candidates, and growth of steps, from rung to rung."""


class Result(msgspec.Struct, frozen=True):
    """Result of one run of a candidate."""

    status: Status
    step_seconds: tuple[float, ...] = ()
    """Duration of each measured optimizer step."""
    memory: int = 0
    """Largest peak memory of a rank, bytes; on a CPU resident memory."""
    reason: str = ""
    rows: int | None = None
    """First dimension of the first input of the model."""
    wall_s: float = 0.0
    """Duration of the run with start-up."""
    cpu_s: float = 0.0
    """CPU time of all processes of the run."""


@dataclass
class Entry:
    """A candidate with its results, or the reason why it has none."""

    candidate: Candidate
    results: list[Result] = field(default_factory=list)
    reason: str = ""
    """Why it is not better, or not measured."""

    @property
    def ran(self) -> bool:
        """Whether all its runs were measured completely."""
        return bool(self.results) and all(r.status == "measured" for r in self.results)

    @property
    def status(self) -> str:
        """Status of its last run, or ``dropped``."""
        return self.results[-1].status if self.results else "dropped"

    @property
    def step_s(self) -> float:
        """Median duration of the measured steps of all runs; infinite without one."""
        steps = [seconds for result in self.results for seconds in result.step_seconds]
        return statistics.median(steps) if steps else math.inf

    @property
    def noise(self) -> float:
        """Median absolute deviation of the steps, as a share of the median."""
        steps = [seconds for result in self.results for seconds in result.step_seconds]
        if len(steps) < 2:
            return 0.0
        middle = statistics.median(steps)
        return statistics.median(abs(step - middle) for step in steps) / middle

    @property
    def memory(self) -> int:
        """Largest peak memory of a rank, bytes."""
        return max((result.memory for result in self.results), default=0)


Measure = Callable[[Candidate, int, int, float | None], Result]
"""Run a candidate: its rung, the steps to measure, and seconds per step at which to stop early."""


class Search:
    """Search over a space. It is a function of its results: repeated results repeat the search.

    Args:
        space: The candidates.
        profile: Memory of the layouts and the machine.
        measure: Runs a candidate.
        metric: Objective.
        method: ``guided`` explores one setting after the other; ``grid`` measures every candidate
            in the first rung; ``random`` does so in random order.
        steps: Measured steps in the last rung.
        max_candidates: Candidates that are measured at most.
        patience: Candidates without improvement after which exploration ends; None for no limit.
    """

    def __init__(
        self,
        space: Space,
        profile: Profile,
        measure: Measure,
        *,
        metric: Metric = "throughput",
        method: Method = "guided",
        steps: int = 20,
        max_candidates: int = 50,
        patience: int | None = None,
    ) -> None:
        self.space = space
        self.entries = {candidate: Entry(candidate) for candidate in space.grid()}
        self._needs = {estimate.layout: estimate for estimate in profile.layouts}
        self._profile = profile
        self._measure = measure
        self._metric = metric
        self._method = method
        self._rungs = [max(3, steps // _ETA**2), max(3, steps // _ETA), steps]
        self._max_candidates = max_candidates
        self._patience = patience
        self._since_best = 0

    def run(self) -> Entry | None:
        """Return the best candidate; None if none could be measured."""
        for entry in self.entries.values():
            entry.reason = self._profile.problem(self._needs[entry.candidate.layout]) or ""
        if self._method == "guided":
            self._explore()
        else:
            order = list(self.entries)
            if self._method == "random":
                random.Random(0).shuffle(order)  # noqa: S311 - an order, not a secret
            for candidate in order:
                self._try(candidate)
        return self._halve()

    # -- exploration ----------------------------------------------------------------------------

    def _explore(self) -> None:
        """Vary one setting after the other, from the least communication on."""
        space = self.space
        middle = len(space.micro_batches) // 2
        for checkpointing in space.checkpointing:
            for layout in space.layouts:
                if self._best() is None:
                    self._climb(layout, middle, checkpointing=checkpointing)
        if self._best() is None:
            return
        first = self._expect_best().candidate.layout
        for layout in space.layouts[space.layouts.index(first) + 1 :]:
            best = self._expect_best()
            checkpointing = best.candidate.checkpointing
            candidate = space.candidate(
                best.candidate.micro_batch, layout, checkpointing=checkpointing
            )
            entry = self._try(candidate)
            if entry.ran and (
                self._score(entry) <= _CLOSE * self._score(best) or self._is_limited(best)
            ):
                position = space.micro_batches.index(best.candidate.micro_batch)
                self._climb(layout, position, checkpointing=checkpointing, directions=(1,))
        if len(space.checkpointing) > 1:
            self._explore_checkpointing()
        fastest = self._expect_best().candidate
        for bucket in space.buckets_of(fastest.layout):
            self._try(msgspec.structs.replace(fastest, bucket=bucket))
        for entry in self.entries.values():
            if not entry.results and not entry.reason:
                cause = self._memory_cause(entry.candidate)
                entry.reason = cause or self._difference(entry.candidate)

    def _explore_checkpointing(self) -> None:
        best = self._expect_best()
        checkpointing = not best.candidate.checkpointing
        candidate = msgspec.structs.replace(best.candidate, checkpointing=checkpointing)
        entry = self._try(candidate)
        if entry.ran and (self._is_limited(best) or self._score(entry) <= self._score(best)):
            position = self.space.micro_batches.index(candidate.micro_batch)
            layout = candidate.layout
            self._climb(layout, position, checkpointing=checkpointing, directions=(1,))

    def _climb(
        self,
        layout: Layout,
        start: int,
        *,
        checkpointing: bool,
        directions: Sequence[int] = (1, -1),
    ) -> None:
        """Measure neighboring micro-batches from a position on, while they are not slower."""
        sizes = self.space.micro_batches

        def attempt(position: int) -> Entry:
            candidate = self.space.candidate(sizes[position], layout, checkpointing=checkpointing)
            return self._try(candidate)

        best = attempt(start)
        while not best.ran and best.status == "out of memory" and start > 0:
            start -= 1
            best = attempt(start)
        if not best.ran:
            return
        lowest = self._score(best)
        for direction in directions:
            position = start + direction
            improved = False
            while 0 <= position < len(sizes):
                entry = attempt(position)
                if not entry.ran or self._score(entry) > _FLAT * lowest:
                    break
                improved = improved or self._score(entry) < lowest
                lowest = min(lowest, self._score(entry))
                position += direction
            if improved:
                return

    def _is_limited(self, entry: Entry) -> bool:
        """Return whether memory prevents a larger micro-batch than that of an entry."""
        sizes = self.space.micro_batches
        position = sizes.index(entry.candidate.micro_batch) + 1
        if position == len(sizes):
            return False
        larger = msgspec.structs.replace(
            entry.candidate,
            micro_batch=sizes[position],
            accumulation_steps=self.space.samples // sizes[position],
        )
        following = self.entries.get(larger)
        return following is not None and (
            following.status == "out of memory" or bool(self._smaller_failure(larger))
        )

    def _difference(self, candidate: Candidate) -> str:
        """Return which measured candidates made this one unnecessary."""
        best = self._expect_best().candidate
        for name, value, other in (
            ("layouts", candidate.layout, best.layout),
            ("settings of activation checkpointing", candidate.checkpointing, best.checkpointing),
            ("sizes of buckets", candidate.bucket, best.bucket),
        ):
            if value != other:
                return f"not measured: other {name} were better"
        return "not measured: other micro-batches were better"

    # -- runs -----------------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> Entry:
        """Measure a candidate in the first rung, unless a rule drops it or it has been measured."""
        entry = self.entries[candidate]
        if entry.results or entry.reason:
            return entry
        entry.reason = self._memory_cause(candidate)
        if entry.reason:
            return entry
        measured = [other for other in self.entries.values() if other.results]
        if len(measured) >= self._max_candidates:
            entry.reason = f"not measured: {self._max_candidates} candidates were"
            return entry
        if self._patience is not None and self._since_best >= self._patience:
            entry.reason = f"not measured: {self._patience} candidates brought no improvement"
            return entry
        before = self._best()
        self._run(entry, 0)
        improved = self._best() is not before
        self._since_best = 0 if improved else self._since_best + 1
        return entry

    def _run(self, entry: Entry, rung: int) -> None:
        best = self._best()
        # Survivors are measured completely: a disturbance must not drop the best of them.
        stops_early = rung == 0 and self._metric != "memory" and best is not None
        limit = 2 * best.step_s if stops_early and best is not None else None
        result = self._measure(entry.candidate, rung, self._rungs[rung], limit)
        entry.results.append(result)
        entry.reason = result.reason

    def _memory_cause(self, candidate: Candidate) -> str:
        """Return why a candidate would run out of memory; empty if it might not."""
        cause = self._smaller_failure(candidate)
        return f"out of memory expected: {cause} ran out of memory" if cause else ""

    def _smaller_failure(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate that needs no more memory and ran out of it, if there is one."""
        for other, entry in self.entries.items():
            if (
                entry.status == "out of memory"
                and other.micro_batch <= candidate.micro_batch
                and other.checkpointing >= candidate.checkpointing
                and self._is_smaller(other.layout, candidate.layout)
            ):
                return other
        return None

    def _is_smaller(self, layout: Layout, other: Layout) -> bool:
        first, second = self._needs[layout], self._needs[other]
        return first.device_bytes <= second.device_bytes and first.host_bytes <= second.host_bytes

    def _score(self, entry: Entry) -> float:
        return float(entry.memory) if self._metric == "memory" else entry.step_s

    def _ranking(self) -> list[Entry]:
        measured = [entry for entry in self.entries.values() if entry.ran]
        return sorted(measured, key=lambda entry: (self._score(entry), entry.step_s))

    def _best(self) -> Entry | None:
        return next(iter(self._ranking()), None)

    def _expect_best(self) -> Entry:
        best = self._best()
        if best is None:
            raise LookupError("no candidate has been measured")
        return best

    # -- successive halving ---------------------------------------------------------------------

    def _halve(self) -> Entry | None:
        """Measure the best candidates again with more steps, fewer of them in each rung."""
        survivors: Sequence[Entry] = self._ranking()
        for rung in range(1, len(self._rungs)):
            if len(survivors) < 2:
                break
            keep = max(2, math.ceil(len(survivors) / _ETA))
            for entry in survivors[keep:]:
                entry.reason = f"rung {rung - 1}: among the slower ones"
                if self._metric == "memory":
                    entry.reason = f"rung {rung - 1}: more memory than others"
            survivors = survivors[:keep]
            for entry in survivors:
                self._run(entry, rung)
            survivors = sorted(
                (entry for entry in survivors if entry.ran),
                key=lambda entry: (self._score(entry), entry.step_s),
            )
        if not survivors:
            return self._best()
        close = [e for e in survivors if self._score(e) <= _TIE * self._score(survivors[0])]
        best = min(close, key=lambda entry: (entry.memory, entry.step_s))
        for entry in survivors:
            if entry is not best:
                entry.reason = "last rung: another one was better"
                if entry.step_s < best.step_s:
                    entry.reason = f"last rung: within {_TIE - 1:.0%} of the best, more memory"
        best.reason = "best"
        return best
