"""The report of the searchers' benchmark, of runs that are all there and of runs that are not."""

import json
from pathlib import Path

import pytest

pytest.importorskip("scipy")

from benchmarks.searching import report

NAMES = [objective.name for objective in report.ALL]


def runs(path: Path, results: dict[str, list[float]], objectives: list[str]) -> report.Runs:
    """Three seeds of each: a method's regrets at the times."""
    rows = [
        {"method": method, "objective": name, "seed": seed, "regret": [r * (1 + seed) for r in at]}
        for method, at in results.items()
        for name in objectives
        for seed in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return report.read([path])


def row(lines: list[str], method: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"| {method} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_methods_with_different_end_times_are_compared(tmp_path: Path) -> None:
    results = {
        "random": [1.0, 0.8, 0.6, 0.4, 0.2],
        report.OURS: [0.9, 0.4, 0.2, 0.1, 0.05],
        "short": [0.5, 0.5],
    }
    all_of_them = runs(tmp_path / "runs", results, NAMES)
    ranked = report.ranks(all_of_them)
    assert "3 to 3 seeds of 43 objectives" in ranked[1]
    assert row(ranked, report.OURS)[1:] == ["2.00", "1.00", "1.00", "1.00", "1.00"]
    assert [cell.split(" ")[0] for cell in row(ranked, "short")[1:]] == [
        "1.00", "2.00", "-", "-", "-",
    ]  # fmt: skip
    compared = row(report.comparisons(all_of_them), "random")
    assert compared[1] == "129"
    assert [cell.split(" ")[0] for cell in compared[2:]] == ["0.90", "0.50", "0.33", "0.25", "0.25"]
    (full,) = [
        line
        for line in report.tables(all_of_them)[-200:]
        if line.startswith(f"| {report.OURS} |") and "0.25" in line and "0.33, 0.25" in line
    ][-1:]
    assert "| 0.90 | 0.50 | 0.33 | 0.25 | 0.25 |" in full


@pytest.mark.parametrize("methods", [["random", report.OURS], [report.OURS], ["random"]])
@pytest.mark.parametrize("objectives", [NAMES[:1], NAMES])
def test_missing_runs_are_dashes(methods: list[str], objectives: list[str], tmp_path: Path) -> None:
    results = runs(tmp_path / "runs", {method: [0.5, 0.25] for method in methods}, objectives)
    lines = report.tables(results) + report.comparisons(results) + report.ranks(results)
    assert any("-" in line for line in lines)
    if len(methods) < 2 or objectives is not NAMES:
        assert lines[-1].startswith("No ranks: ")
