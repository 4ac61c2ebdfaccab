"""Objects of the Python client: experiments, trials, runs, checkpoints, models, and others."""

from zerolab.client.objects.agent import Agent
from zerolab.client.objects.checkpoint import Checkpoint
from zerolab.client.objects.experiment import Experiment
from zerolab.client.objects.importance import Importance
from zerolab.client.objects.log_lines import LogLine
from zerolab.client.objects.metrics_table import MetricsTable
from zerolab.client.objects.model import Model, ModelVersion
from zerolab.client.objects.project import Project
from zerolab.client.objects.run import Run
from zerolab.client.objects.server_object import ServerObject
from zerolab.client.objects.table import ObjectList
from zerolab.client.objects.trial import Trial

__all__ = [
    "Agent",
    "Checkpoint",
    "Experiment",
    "Importance",
    "LogLine",
    "MetricsTable",
    "Model",
    "ModelVersion",
    "ObjectList",
    "Project",
    "Run",
    "ServerObject",
    "Trial",
]
