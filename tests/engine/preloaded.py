"""Preloaded process from which the ranks of tests are forked: imported by a fork server."""

import os

import hypothesis
import pytest
import sklearn.metrics  # as transformers' Trainer does; the Trainer itself is imported by each test
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed.checkpoint.hf_storage
import torch.distributed.fsdp
import transformers.models.auto.configuration_auto

from tests.engine import models
from zerolab.linux import die_with_parent
from zerotrial import trainer

__all__ = ["hypothesis", "models", "pytest", "sklearn", "torch", "trainer", "transformers"]

die_with_parent(os.getppid())
