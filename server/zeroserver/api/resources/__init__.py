"""JSON resources of the REST API, each declared once.

The OpenAPI document, the types of the web page (``server/web/src/resources.ts``) and the tables of
``docs/reference/rest.md`` are derived from these structs; ``python -m tools.api_types`` writes the
latter two. A field named like a column is read from it.
"""

from zeroserver.api.resources.agents import (
    Agent,
    AgentAnswer,
    AgentPage,
    LoadHistoryAnswer,
    MachineLoad,
    Pool,
    Slot,
    SlotHistory,
    SlotUse,
)
from zeroserver.api.resources.checkpoints import (
    BestCheckpoint,
    BestCheckpointAnswer,
    Checkpoint,
    CheckpointAnswer,
    CheckpointPage,
)
from zeroserver.api.resources.errors import ErrorAnswer, ErrorBody
from zeroserver.api.resources.experiments import Experiment, ExperimentAnswer, ExperimentPage
from zeroserver.api.resources.logs import Log, LogPage
from zeroserver.api.resources.metrics import Curve, MetricName, MetricNames, Metrics
from zeroserver.api.resources.server import Cluster, Health, Info, LoginLink, Token
from zeroserver.api.resources.trials import Run, RunPage, Trial, TrialAnswer, TrialPage

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentPage",
    "BestCheckpoint",
    "BestCheckpointAnswer",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
    "Cluster",
    "Curve",
    "ErrorAnswer",
    "ErrorBody",
    "Experiment",
    "ExperimentAnswer",
    "ExperimentPage",
    "Health",
    "Info",
    "LoadHistoryAnswer",
    "Log",
    "LogPage",
    "LoginLink",
    "MachineLoad",
    "MetricName",
    "MetricNames",
    "Metrics",
    "Pool",
    "Run",
    "RunPage",
    "Slot",
    "SlotHistory",
    "SlotUse",
    "Token",
    "Trial",
    "TrialAnswer",
    "TrialPage",
]
