"""The CPU that one decision takes when a search has a thousand trials."""

import time
from collections import deque
from random import Random

from benchmarks.searching.methods import METHODS
from benchmarks.searching.suite import OBJECTIVES
from zerolab.searcher import Continue, Create, Searcher, Stop

TRIALS = 1000
DECISIONS = 200
OBJECTIVE = "conditional optimizer"


def decision_ms(method: str) -> float:
    """Milliseconds of CPU a validation, from the thousandth trial on; workers report in turn."""
    objective = OBJECTIVES[OBJECTIVE]
    searcher: Searcher = METHODS[method](objective.space, 0)
    rng, created, counted, spent = Random(0), 0, 0, 0.0
    training: deque[tuple[int, int]] = deque()
    waiting = deque(searcher.initial_operations())
    until: dict[int, int] = {}
    while counted < DECISIONS:
        while waiting:
            operation = waiting.popleft()
            if isinstance(operation, Create):
                created += 1
                training.append((operation.trial_id, 0))
            elif isinstance(operation, Continue):
                until[operation.trial_id] = operation.until
                if all(trial_id != operation.trial_id for trial_id, _ in training):
                    training.append((operation.trial_id, operation.until))
            elif isinstance(operation, Stop):
                training = deque(each for each in training if each[0] != operation.trial_id)
                waiting.extend(searcher.trial_exited(operation.trial_id))
        trial_id, _ = training.popleft()
        length = until.get(trial_id, 27)
        began = time.process_time()
        waiting.extend(searcher.validation_completed(trial_id, rng.random(), length))
        if length == 27:
            waiting.extend(searcher.trial_exited(trial_id))
        if created >= TRIALS:
            spent += time.process_time() - began
            counted += 1
    return 1000 * spent / DECISIONS
