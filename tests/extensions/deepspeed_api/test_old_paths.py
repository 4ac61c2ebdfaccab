"""Old import paths of the extensions, which installed programs and saved checkpoints use."""

import runpy
import sys

import pytest

from tests.engine.ranks import run_on_ranks


def execute(program: str) -> None:
    """Run a module with ``--help``, or code."""
    module = program.removeprefix("-m ")
    if module == program:
        exec(program)
        return
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code  # noqa: PT017 - help ends with it


@pytest.mark.parametrize(
    "program",
    [
        "-m zerotrial.compat.deepspeed",
        "from zerotrial.compat.deepspeed import install; install(); import deepspeed",
        "from zerotrial.compat.deepspeed.names.zero_to_fp32 import main",
        "-m zerotrial.engine.checkpoint.deepspeed",
        "from zerotrial.engine.checkpoint.deepspeed.convert import import_deepspeed",
        "from zerotrial.compat.huggingface import install; install()",
        "from zerotrial.compat.huggingface.hooks import install",
    ],
)
def test_old_import_paths(program: str) -> None:
    run_on_ranks(execute, 1, program)
