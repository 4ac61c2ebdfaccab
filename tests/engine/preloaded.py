"""Preloaded process from which the ranks of tests are forked: imported by a fork server."""

import os

import hypothesis
import pytest
import sklearn.metrics  # transformers' Trainer imports it, which takes two seconds
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed.fsdp

from tests.engine import models
from zerolab.linux import die_with_parent
from zerotrial import trainer

__all__ = ["hypothesis", "models", "pytest", "sklearn", "torch", "trainer"]

die_with_parent(os.getppid())
