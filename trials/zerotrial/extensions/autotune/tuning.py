"""Autotuning of a subject: profile, search, results in a directory."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from zerolab import __version__
from zerolab.contract.messages import SlotInfo
from zerolab.errors import ConfigError, TrialError
from zerolab.files import write_atomic
from zerolab.formatting import size_text
from zerotrial.extensions.autotune.candidates import Candidate, Profile, make_space
from zerotrial.extensions.autotune.journal import Journal
from zerotrial.extensions.autotune.runner import Runner
from zerotrial.extensions.autotune.search import Entry, Result, Search
from zerotrial.extensions.autotune.settings import Settings
from zerotrial.extensions.autotune.subjects import Subject, with_overrides

__all__ = ["TUNED_FILE", "Tuning", "table_text", "tune"]

TUNED_FILE = "ds_config_optimal.json"
"""Name of the tuned engine file, as in DeepSpeed."""


@dataclass(frozen=True)
class Tuning:
    """Result of a search."""

    best: Entry
    entries: Sequence[Entry]
    profile: Profile
    runs: int
    cpu_s: float
    """CPU time of all runs, seconds."""
    wall_s: float
    """Duration of all runs, seconds."""
    tuned_file: Path
    table_file: Path

    @property
    def samples_per_second(self) -> float:
        """Throughput of the best candidate."""
        return self.profile.train_batch / self.best.step_s


def tune(
    subject: Subject,
    slots: Sequence[SlotInfo],
    settings: Settings,
    *,
    as_deepspeed: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Tuning:
    """Search for the best settings, and write them with a table of all candidates.

    Args:
        subject: What is tuned.
        slots: Slots of the ranks.
        settings: Settings of the search.
        as_deepspeed: Let ``import deepspeed`` import this engine.
        report: Gets a line for each step of the search.

    Raises:
        ConfigError: If the settings leave no candidate, or the directory has other results.
        TrialError: If the model cannot be profiled, or no candidate could be measured.
    """
    directory = settings.results_dir.absolute()
    fingerprint = [__version__, len(slots), subject.fingerprint(), settings.fingerprint()]
    journal = Journal(directory, fingerprint, restart=settings.restart)
    if len(journal):
        report(f"continuing {directory} with {len(journal)} earlier run(s)")
    runner = Runner(
        subject,
        slots,
        directory,
        clock=settings.clock,
        warmup=settings.warmup,
        timeout_s=settings.timeout_s,
        as_deepspeed=as_deepspeed,
    )
    try:
        return _Tuner(subject, settings, journal, runner, report).run()
    finally:
        runner.close()


class _Tuner:
    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        journal: Journal,
        runner: Runner,
        report: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._settings = settings
        self._journal = journal
        self._runner = runner
        self._report = report
        self._rows: dict[int, int] = {}
        self._warned = False

    def run(self) -> Tuning:
        settings = self._settings
        profile = self._profile()
        self._data_ranks, self._memory = profile.data_ranks, profile.run_bytes
        space = make_space(
            profile,
            lowest=settings.lowest,
            highest=settings.highest,
            only_stage=settings.only_stage,
        )
        if not space.micro_batches:
            raise ConfigError(
                self._subject.source,
                [
                    f"train_batch_size: must have a divisor among the micro-batches, got "
                    f"{space.samples} samples on a rank"
                ],
            )
        search = Search(
            space,
            profile,
            self._measure,
            metric=settings.metric,
            method=settings.method,
            steps=settings.steps,
            max_candidates=settings.max_candidates,
            patience=settings.patience,
        )
        best = search.run()
        entries = list(search.entries.values())
        table = self._journal.directory / "table.md"
        write_atomic(table, table_text(entries, profile).encode(), mode=0o644)
        if best is None:
            first = next((e for e in entries if e.results), entries[0])
            raise TrialError(
                f"{self._subject.source}: no candidate could be measured; the first one: "
                f"{first.candidate}: {first.reason}; all are in {table}"
            )
        tuned = self._journal.directory / TUNED_FILE
        content = with_overrides(
            self._subject.content, best.candidate.overrides(profile.data_ranks)
        )
        text = msgspec.json.format(msgspec.json.encode(content))
        write_atomic(tuned, text + b"\n", mode=0o644)
        results = [result for entry in entries for result in entry.results]
        return Tuning(
            best,
            entries,
            profile,
            len(results),
            sum(result.cpu_s for result in results),
            sum(result.wall_s for result in results),
            tuned,
            table,
        )

    def _profile(self) -> Profile:
        profile = self._journal.profile
        if profile is None:
            profile = self._runner.profile()
            if self._settings.memory_bytes is not None:
                profile = msgspec.structs.replace(profile, device_bytes=self._settings.memory_bytes)
            self._journal.add_profile(profile)
        self._report(
            f"model: {profile.parameters:,} parameters; a batch of {profile.train_batch} samples "
            f"on {profile.data_ranks} data-parallel rank(s); a rank may use "
            f"{size_text(profile.device_bytes)} ({profile.device})"
        )
        return profile

    def _measure(
        self, candidate: Candidate, rung: int, steps: int, limit_s: float | None
    ) -> Result:
        result = self._journal.result(candidate, rung)
        if result is None:
            limits_memory = self._settings.memory_bytes is not None or self._is_on_cpu()
            result = self._runner.measure(
                candidate,
                self._data_ranks,
                steps,
                limit_s,
                self._memory if limits_memory else None,
            )
            self._journal.add(candidate, rung, result)
        self._check_rows(candidate, result)
        self._report(f"rung {rung}: {candidate}: {self._text(result)}")
        return result

    def _is_on_cpu(self) -> bool:
        return self._journal.profile is not None and self._journal.profile.device == "cpu"

    def _text(self, result: Result) -> str:
        profile = self._journal.profile
        if result.status != "measured" or profile is None:
            return result.reason
        rate = profile.train_batch / statistics.median(result.step_seconds)
        return f"{rate:.4g} samples/s, {size_text(result.memory)}"

    def _check_rows(self, candidate: Candidate, result: Result) -> None:
        """Report a script whose batches do not seem to follow the micro-batch, once.

        The first dimension need not be the batch, so this is no error.
        """
        if result.rows is None or self._warned:
            return
        for micro, rows in self._rows.items():
            if micro != candidate.micro_batch and rows == result.rows:
                self._warned = True
                self._report(
                    f"warning: the first input of the model has {rows} rows at micro-batches of "
                    f"{micro} and {candidate.micro_batch}. If these are samples, the timings are "
                    "wrong: read the size from the engine, or map it to an argument of the script "
                    "with autotuning.arg_mappings"
                )
        self._rows[candidate.micro_batch] = result.rows


def table_text(entries: Sequence[Entry], profile: Profile) -> str:
    """Return a Markdown table of all candidates: the best first, then by rung and duration.

    Args:
        entries: Candidates with their results.
        profile: The model and its batch.
    """
    titles = ("candidate", "samples/s", "step", "noise", "memory", "steps", "result")
    rows = [titles, tuple("---" for _ in titles)]
    order = sorted(
        entries,
        key=lambda e: (e.reason != "best", not e.ran, -len(e.results), e.step_s),
    )
    for entry in order:
        steps = sum(len(result.step_seconds) for result in entry.results)
        is_timed = entry.ran or entry.status == "slow"
        rows.append(
            (
                str(entry.candidate),
                f"{profile.train_batch / entry.step_s:.4g}" if is_timed else "",
                f"{1000 * entry.step_s:.4g} ms" if is_timed else "",
                f"{entry.noise:.0%}" if is_timed else "",
                size_text(entry.memory) if entry.memory else "",
                str(steps or ""),
                entry.reason or entry.status,
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
