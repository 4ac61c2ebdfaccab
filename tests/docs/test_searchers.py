"""docs/contribute/searcher_method.md: the constants of ``tpe_asha`` equal those of the code."""

from pathlib import Path

import pytest

from zerolab.extensions.searcher_tpe import (
    candidates,
    gaussian,
    ladder,
    parzen,
    proposals,
    rung_correlation,
    scores,
    search,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contribute" / "searcher_method.md"
ENTRIES = tuple(map(int, ladder._ENTRIES))
PROBES = [number for number in range(1, 130) if ladder._is_probe(number)]
LENGTHS = {27: "a 27th", 9: "a 9th", 3: "a third"}
NAMES = ", ".join(LENGTHS[ladder._DIVISOR**power] for power in range(ladder._RUNGS - 1, 0, -1))
LONG = ladder._DIVISOR ** (ladder._RUNGS - 1)
LOW, HIGH = rung_correlation._NOTHING, rung_correlation._PRIOR
STRENGTH = rung_correlation._STRENGTH
WIDTHS = candidates._WIDTHS

SENTENCES = (
    f"The rungs are {NAMES} of `max_length` and the whole of it",
    f"so there are {ladder._RUNGS} of them from {LONG} on",
    f"of the best {LENGTHS[ladder._DIVISOR].removeprefix('a ')} (rounded down, but up at the rung "
    "below the top) of all",
    f"New trials number {PROBES[0]}, {PROBES[1]} and {PROBES[2]}, and then "
    f"{PROBES[3]}, {PROBES[4]}, {PROBES[5]} and so on",
    f"Of {sum(ENTRIES)} other new trials {ENTRIES[0]}, {ENTRIES[1]} and {ENTRIES[2]} are first "
    "judged at rung 0, 1 and 2",
    f"the newest {rung_correlation._NEWEST} of them; they are m",
    f"p(a, b) = (A + {STRENGTH} e) / (W + {STRENGTH}), and p(a, b) = e when m < 2",
    f"e, is {HIGH} for p(0, 1), then p(k - 1, k), but at least {LOW} and at most {HIGH}",
    f"(min over b of p(k, b) - {LOW}) / ({rung_correlation._FULL} - {LOW})",
    f"One trial in {1 / proposals._UNIFORM:.0f} ({proposals._UNIFORM:.0%}".replace("%", " %)"),
    f"at least {proposals._ENOUGH} finite values",
    f"the best {proposals._GOOD:.0%}".replace("%", " %")
    + f", rounded up, at most {proposals._MOST_GOOD}, and ",
    f"In {proposals._BY_DENSITIES:.0%} of the proposals, the two densities choose one of "
    f"{proposals._CANDIDATES} candidates drawn from the density of the good".replace("%", " %"),
    f"among these, {proposals._MOVED} *moves* and {proposals._ANYWHERE} points from anywhere",
    f"as many as are good there, at least {proposals._FEWEST_MOVED_FROM}",
    f"with probability {candidates._STAYS} as it is",
    f"a normal deviate of {WIDTHS[0]}, {WIDTHS[1]} or {WIDTHS[2]}, in turn",
    f"at least {candidates._STEPS} steps",
    f"a category in {candidates._CHANGES:.0%} of the cases to any".replace("%", " %"),
    f"at most {proposals._MOST_BAD} of them, drawn at random when there are more",
    f"the width {parzen._WIDTH} (M + 1)^(-1 / (D + 4))",
    f"the {scores._QUANTILES[0]:.0%} quantile and the median".replace("%", " %"),
    f"at the worst of that scale and {scores._LOWER} below its best",
    f"With fewer than {scores._FEWEST} finite values",
    f"The distance of two categories is the root of {2 * gaussian._APART**2}",
    f"expected at {gaussian._LENGTH} times the root of D, {gaussian._DECAY}, and {gaussian._NOISE} "
    f"of the whole variance at the highest rung and {gaussian._NOISE_GROWTH:.0f} times as much",
    f"with spreads of {gaussian._LENGTH_SPREAD:.0f}, {gaussian._DECAY_SPREAD:.0f} and "
    f"{gaussian._NOISE_SPREAD}",
    f"{gaussian._FLOOR} is added to every noise",
    f"{gaussian._STEPS} steps of Rprop (initial step {gaussian._STEP}, factor {gaussian._FASTER} "
    f"if the sign of the gradient stays, {gaussian._SLOWER} if it changes, steps from "
    f"{gaussian._LEAST_STEP} to {gaussian._MOST_STEP}), at most {gaussian._FARTHEST:.0f} spreads",
    f"rounded to {gaussian._SHAPE_DIGITS} decimals (the gradient to {gaussian._GRADIENT_DIGITS})",
    f"there are {proposals._GROWTH} times as many results",
    f"At most {proposals._RESULTS} results are used",
    f"half of the remaining number, or {proposals._LEAST_OF_A_RUNG}, or as many as it has",
    f"highest trusted rung with at least {proposals._ENOUGH_ABOVE} finite values",
    f"the newest {proposals._MOST_PENDING} of the trials that have not been judged",
    f"the newest {proposals._MOST_PENDING} trials that have not been judged",
    f"more than {proposals._MOST_FEATURES} features (one for a number, two for one that does not "
    f"always exist, one for each category, of a dimension at most {proposals._RESULTS})",
    f"Of more than {search._MOST_PROPOSED} trials that begin at one event",
    f"Gains are compared to {proposals._DIGITS} decimals",
)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_documented_constants_equal_code(sentence: str) -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    method = text.partition("## The method of `tpe_asha`")[2].partition(" ## ")[0]
    assert sentence in method
