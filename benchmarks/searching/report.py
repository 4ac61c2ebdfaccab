"""Tables, ranks with paired significance, and the plot, from the stored runs."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from scipy.stats import rankdata, wilcoxon

from benchmarks.searching.clock import TIMES
from benchmarks.searching.suite import CHOSEN_ON, CONFIRMED_ON, TRAPS

FLOOR = 1e-3
"""Regrets below it count as this: a thousandth of what a random configuration lacks is noise."""
OURS = "tpe_asha"

PARTS = {
    "chosen on": CHOSEN_ON,
    "chosen on, traps": TRAPS,
    "confirmed on": CONFIRMED_ON,
    "all": CHOSEN_ON + TRAPS + CONFIRMED_ON,
}

ALL = PARTS["all"]

Runs = dict[tuple[str, str], dict[int, list[float]]]
"""(method, objective) -> seed -> regret at the times."""


def read(paths: Iterable[Path]) -> Runs:
    runs: Runs = defaultdict(dict)
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            there = runs[row["method"], row["objective"]].get(row["seed"], [])
            if len(row["regret"]) > len(there):
                runs[row["method"], row["objective"]][row["seed"]] = row["regret"]
    return runs


def ratio(runs: Runs, method: str, objective: str, index: int) -> float | None:
    """Median regret as a part of random's, over the seeds that both have."""
    mine, random = runs.get((method, objective), {}), runs.get(("random", objective), {})
    pairs = [
        (mine[seed][index], random[seed][index])
        for seed in mine
        if seed in random and len(mine[seed]) > index
    ]
    if len(pairs) < 3:
        return None
    own, others = zip(*pairs, strict=True)
    return max(statistics.median(own), FLOOR) / max(statistics.median(others), FLOOR)


def mean(values: Sequence[float | None]) -> float | None:
    """Geometric, if every objective has a value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.exp(sum(map(math.log, known)) / len(known))


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def tables(runs: Runs) -> list[str]:
    """Ratios to random: over each half of the objectives, over all, and at each objective."""
    methods = list(dict.fromkeys(method for method, _ in runs))
    lines = []
    for title, objectives in PARTS.items():
        lines += ["", f"Regret as a part of random's, {len(objectives)} objectives ({title})", ""]
        lines += ["| method | " + " | ".join(f"T = {t}" for t in TIMES) + " | worst at 5, 10 |"]
        lines += ["|" + "---|" * (len(TIMES) + 2)]
        for method in methods:
            each = [[ratio(runs, method, o.name, i) for o in objectives] for i in range(len(TIMES))]
            worst = [max((v for v in each[i] if v is not None), default=None) for i in (2, 3)]
            cells = [shown(mean(values)) for values in each]
            cells.append(", ".join(map(shown, worst)))
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "At each objective, T = 5 / T = 10",
        "",
        "| objective | " + " | ".join(methods) + " |",
    ]
    lines += ["|" + "---|" * (len(methods) + 1)]
    for objective in ALL:
        cells = [
            " / ".join(shown(ratio(runs, method, objective.name, i)) for i in (2, 3))
            for method in methods
        ]
        lines.append(f"| {objective.name} | " + " | ".join(cells) + " |")
    return lines


def against(runs: Runs, peer: str, index: int) -> tuple[float, float, int] | None:
    """Our regret as a part of a peer's at one time, and how probable it is by chance.

    Only objectives count of which the peer has three runs or more, and it must have half of them.

    Returns:
        The geometric mean of the ratios of paired runs' medians, the p of Wilcoxon's
        signed-rank test over all pairs' log ratios (ours is smaller), and the number of pairs.
    """
    logs: list[float] = []
    medians: list[float | None] = []
    for objective in ALL:
        mine, other = runs.get((OURS, objective.name), {}), runs.get((peer, objective.name), {})
        pairs = [
            (max(mine[seed][index], FLOOR), max(other[seed][index], FLOOR))
            for seed in sorted(mine)
            if seed in other and len(mine[seed]) > index and len(other[seed]) > index
        ]
        if len(pairs) < 3:
            continue
        logs += [math.log(own / its) for own, its in pairs]
        own, its = zip(*pairs, strict=True)
        medians.append(statistics.median(own) / statistics.median(its))
    ratio_of_medians = mean(medians)
    if ratio_of_medians is None or len(medians) < len(ALL) / 2:
        return None
    p = float(wilcoxon(logs, alternative="less", zero_method="zsplit").pvalue)
    return ratio_of_medians, p, len(logs)


def comparisons(runs: Runs) -> list[str]:
    """Ours beside each peer, paired by objective and seed."""
    lines = ["", f"{OURS} as a part of each method's regret (p of Wilcoxon's test, paired)", ""]
    lines += ["| method | pairs | " + " | ".join(f"T = {t}" for t in TIMES) + " |"]
    lines += ["|" + "---|" * (len(TIMES) + 2)]
    for peer in dict.fromkeys(method for method, _ in runs):
        if peer == OURS:
            continue
        found = [against(runs, peer, index) for index in range(len(TIMES))]
        cells = ["-" if f is None else f"{f[0]:.2f} ({f[1]:.1g})" for f in found]
        pairs = next((f[2] for f in found if f is not None), 0)
        lines.append(f"| {peer} | {pairs} | " + " | ".join(cells) + " |")
    return lines


def ranks(runs: Runs) -> list[str]:
    """Mean rank of every method, and how probable its distance from ours is by chance.

    Ranked are the regrets of one objective and seed, of the methods that have runs of every
    objective at that time, where all of them ran it; each objective weighs the same. The p is that
    of Wilcoxon's signed-rank test over the objectives' mean ranks, two-sided, after Holm's
    correction for as many methods as are compared.
    """
    methods = list(dict.fromkeys(method for method, _ in runs))
    table: dict[str, list[str]] = {method: [] for method in methods}
    fewest = []
    for index in range(len(TIMES)):
        here = [method for method in methods if _is_everywhere(runs, method, index)]
        if OURS not in here or len(here) < 2:
            for cells in table.values():
                cells.append("-")
            continue
        means = []  # for each objective, each method's mean rank
        for objective in ALL:
            each = [runs[method, objective.name] for method in here]
            shared = set.intersection(
                *({seed for seed in one if len(one[seed]) > index} for one in each)
            )
            rows = [rankdata([max(one[s][index], FLOOR) for one in each]) for s in shared]
            if rows:
                means.append([statistics.fmean(column) for column in zip(*rows, strict=True)])
                fewest.append(len(rows))
        by_method = dict(zip(here, zip(*means, strict=True), strict=True))
        p = corrected({m: apart(by_method[m], by_method[OURS]) for m in here if m != OURS})
        for method in methods:
            told = f" ({p[method]:.1g})" if method in p else ""
            known = method in by_method
            table[method].append(
                f"{statistics.fmean(by_method[method]):.2f}{told}" if known else "-"
            )
    if not fewest:
        return ["", f"No ranks: {OURS} and another method must have a run of every objective"]
    seeds = f"{min(fewest)} to {max(fewest)} seeds of {len(ALL)} objectives"
    lines = ["", f"Mean rank (1 is best; p beside {OURS}, two-sided, Holm), {seeds}", ""]
    lines += [
        "| method | " + " | ".join(f"T = {t}" for t in TIMES) + " |",
        "|" + "---|" * (len(TIMES) + 1),
    ]
    lines += [f"| {method} | " + " | ".join(cells) + " |" for method, cells in table.items()]
    return lines


def _is_everywhere(runs: Runs, method: str, index: int) -> bool:
    """Whether a method has a run of every objective at a time."""
    return all(
        any(len(regrets) > index for regrets in runs.get((method, objective.name), {}).values())
        for objective in ALL
    )


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test."""
    differences = [a - b for a, b in zip(one, other, strict=True)]
    return float(wilcoxon(differences, zero_method="zsplit").pvalue)


def corrected(p: dict[str, float]) -> dict[str, float]:
    """Holm's correction for several comparisons."""
    reached, found = 0.0, {}
    for place, name in enumerate(sorted(p, key=lambda name: p[name])):
        reached = max(reached, min(p[name] * (len(p) - place), 1.0))
        found[name] = reached
    return found


def plot(runs: Runs, path: Path) -> None:
    """Ratios to random over time, for each part of the objectives."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5), sharey=True)
    colours = mpl.color_sequences["tab20"]  # as many methods are told apart
    for axis, (title, objectives) in zip(axes, PARTS.items(), strict=False):
        axis.set_prop_cycle(color=colours[::2] + colours[1::2])
        for method in dict.fromkeys(method for method, _ in runs):
            values = [mean([ratio(runs, method, o.name, i) for o in objectives]) for i in range(5)]
            known = [(t, v) for t, v in zip(TIMES, values, strict=True) if v is not None]
            if known:
                style = {"linewidth": 3, "color": "black"} if method == OURS else {"linewidth": 1.2}
                axis.plot(*zip(*known, strict=True), marker="o", label=method, **style)
        axis.set(xscale="log", yscale="log", title=f"{len(objectives)} objectives {title}")
        axis.set(xlabel="time in full trainings, 8 workers")
        axis.set_xticks(TIMES, [str(time) for time in TIMES])
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("regret as a part of random's")
    axes[0].set_yticks(
        [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5], ["0.1", "0.2", "0.3", "0.5", "0.7", "1", "1.5"]
    )
    axes[0].minorticks_off()
    figure.tight_layout(rect=(0, 0, 0.87, 1))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="center right", fontsize=8)
    figure.savefig(path, dpi=110)
