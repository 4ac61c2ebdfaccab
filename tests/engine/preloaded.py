"""Preloaded process from which the ranks of tests are forked: imported by a fork server."""

import contextlib
import os

import hypothesis
import pytest
import sklearn.metrics  # transformers' Trainer imports it, which takes two seconds
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp

from tests.engine import models
from zerolab.linux import die_with_parent
from zerotrial import trainer

with contextlib.suppress(ImportError):  # an extra
    # The Trainer itself must be imported after the hooks of each test are installed.
    pass

__all__ = ["hypothesis", "models", "pytest", "sklearn", "torch", "trainer"]

die_with_parent(os.getppid())
