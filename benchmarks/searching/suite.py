"""The objectives: on the first half methods were chosen, on the second they were confirmed.

Those in ``UNSEEN`` were written before the method was settled, and run once it was.
"""

from benchmarks.searching import conditional, functions, table, unseen
from benchmarks.searching.objective import Objective

CHOSEN_ON: list[Objective] = [
    functions.hartmann(3, "moderate", 3, 3),
    functions.hartmann(6, "bad", 3.5, 4),
    functions.hartmann(3, "terrible", 4, 5),
    functions.branin(),
    functions.short_sighted(),
    functions.power_laws(),
    conditional.optimizers(),
    table.measured("digits mlp"),
]
CONFIRMED_ON: list[Objective] = [
    functions.hartmann(6, "good", 2.5, 2),
    functions.hartmann(6, "terrible", 4, 5),
    functions.hartmann(3, "linear bad", 3.5, 4, functions.LINEAR),
    functions.crossing(),
    functions.ackley(),
    functions.rosenbrock(),
    conditional.plateau(),
    table.measured("digits convolution"),
]
UNSEEN: list[Objective] = [
    unseen.moving(),
    unseen.noisy(),
    unseen.decaying(),
    unseen.sudden(),
    unseen.cliff(),
    unseen.wide(),
    unseen.choices(),
]
OBJECTIVES = {objective.name: objective for objective in CHOSEN_ON + CONFIRMED_ON + UNSEEN}
