"""Old import paths of the extensions, which installed programs and saved checkpoints use."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "zerotrial.compat.deepspeed", "--help"],
        ["-c", "from zerotrial.compat.deepspeed import install; install(); import deepspeed"],
        ["-c", "from zerotrial.compat.deepspeed.names.zero_to_fp32 import main"],
        ["-m", "zerotrial.engine.checkpoint.deepspeed", "--help"],
        ["-c", "from zerotrial.engine.checkpoint.deepspeed.convert import import_deepspeed"],
        ["-c", "from zerotrial.compat.huggingface import install; install()"],
        ["-c", "from zerotrial.compat.huggingface.hooks import install"],
    ],
)
def test_old_import_paths(arguments: list[str]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, timeout=120)
