"""The objectives: variants of the method are chosen on most, and confirmed on the last ones.

Those in ``CONFIRMED_ON`` were written before a choice, and run after it: those of ``unseen.py``
before one that did not hold on them, those of ``later.py`` before the one that was taken
(``docs/contribute/searcher_method.md``).
"""

from benchmarks.searching.objective import Objective
from benchmarks.searching.objectives import (
    conditional,
    functions,
    kinds,
    later,
    table,
    traps,
    unseen,
)

CHOSEN_ON: list[Objective] = [
    functions.hartmann(3, "moderate", 3, 3),
    functions.hartmann(6, "bad", 3.5, 4),
    functions.hartmann(3, "terrible", 4, 5),
    functions.branin(),
    functions.short_sighted(),
    functions.power_laws(),
    conditional.optimizers(),
    table.measured("digits mlp"),
    functions.hartmann(6, "good", 2.5, 2),
    functions.hartmann(6, "terrible", 4, 5),
    functions.hartmann(3, "linear bad", 3.5, 4, functions.LINEAR),
    functions.crossing(),
    functions.ackley(),
    functions.rosenbrock(),
    conditional.plateau(),
    table.measured("digits convolution"),
    kinds.moving(),
    kinds.noisy(),
    kinds.decaying(),
    kinds.sudden(),
    kinds.cliff(),
    kinds.wide(),
    kinds.choices(),
]
TRAPS: list[Objective] = [
    traps.waiting(),
    traps.reversed_late(),
    traps.lottery(),
    traps.diverging(),
    traps.steps(),
]
"""They had a part in the choice, too."""
CONFIRMED_ON: list[Objective] = [
    unseen.staircase(),
    unseen.families(),
    unseen.outliers(),
    unseen.slow_start(),
    unseen.edge(),
    unseen.nested(),
    unseen.overfitting(),
    unseen.honest(),
    unseen.elsewhere(),
    later.coupled(),
    later.two_hollows(),
    later.restarts(),
    later.ticks(),
    later.collapse(),
    later.early_decided(),
]
OBJECTIVES = {objective.name: objective for objective in CHOSEN_ON + TRAPS + CONFIRMED_ON}
