"""The page of what only a GPU runs names lines and tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
ROW = re.compile(r"^\| `(\S+):(\d+)` \| `(.+?)` \| (.+) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")
NEAR = 10
"""Lines by which the code may have moved: other changes need not touch the page each time."""

ASKS = re.compile(r"""torch\.cuda\.|type == "cuda"|"nccl"|pynvml|\["CUDA_VISIBLE_DEVICES"\]""")
"""Code that asks for CUDA."""

ELSEWHERE = {
    "platform/zerolab/cli/local/doctor.py": "shows what it finds",
    "platform/zerolab/contract/diagnosis.py": "names the call in a message",
    "trials/zerotrial/compat/deepspeed/names/comm.py": "asks whether to take gloo instead",
    "trials/zerotrial/process/harness.py": "hands the answer to zerotrial.ranks",
    "trials/zerotrial/trainer.py": "hands the answer to zerotrial.ranks",
    "platform/zerolab/launcher/slurm/partition.py": "Slurm's slots, as its settings say",
}
"""Files that ask, and leave what follows to a line of the page."""


def rows() -> list[tuple[str, int, str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    found = ROW.findall(text)
    assert len(found) == sum(line.startswith("| `") for line in text.splitlines())
    return [(file, int(line), words, tests) for file, line, words, _, tests in found]


def test_the_words_stand_near_their_line() -> None:
    moved = []
    for file, line, words, _ in rows():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        there = [number for number, text in enumerate(lines, 1) if words in text]
        if not any(abs(number - line) <= NEAR for number in there):
            moved.append(f"{file}:{line}: {words!r} is at {there or 'no line'}")
    assert not moved, "docs/gpu.md: correct these lines"


def test_the_tests_are_there_and_wait_for_a_gpu() -> None:
    named = set(TEST.findall(PAGE.read_text(encoding="utf-8")))
    assert named
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), (file, test)
    for file, line, _, tests in rows():
        waiting = TEST.findall(tests)
        assert waiting or tests == "none", (file, line)
        for place, _ in waiting:
            assert '"needs a GPU"' in (ROOT / place).read_text(encoding="utf-8")


def test_every_file_that_asks_for_cuda_is_on_the_page() -> None:
    listed = {file for file, *_ in rows()} | set(ELSEWHERE)
    asking = set()
    for source in (*ROOT.glob("trials/**/*.py"), *ROOT.glob("platform/**/*.py")):
        if ASKS.search(source.read_text(encoding="utf-8")):
            asking.add(str(source.relative_to(ROOT)))
    assert asking - listed == set(), "docs/gpu.md: each needs a line there, or in ELSEWHERE here"
    assert set(ELSEWHERE) - asking == set()
