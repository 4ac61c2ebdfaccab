"""The JSON resources of the REST API, each declared once.

The OpenAPI document, the types of the web page (``server/web/src/resources.ts``) and the tables of
``docs/rest.md`` are made from these structs: ``python -m tools.api_types`` writes the
latter two. A field that is named like a column is read from it.
"""

from zeroserver.api.resources.agents import Agent, AgentAnswer, AgentPage, Slot
from zeroserver.api.resources.analysis import (
    ExperimentColumns,
    HparamShare,
    Importance,
    Improvement,
    SearchProgress,
    TrialColumns,
)
from zeroserver.api.resources.checkpoints import (
    BestCheckpoint,
    BestCheckpointAnswer,
    Checkpoint,
    CheckpointAnswer,
    CheckpointPage,
    Removal,
    RemovedCheckpoint,
)
from zeroserver.api.resources.errors import ErrorAnswer, ErrorBody
from zeroserver.api.resources.experiments import Experiment, ExperimentAnswer, ExperimentPage
from zeroserver.api.resources.logs import Log, LogPage
from zeroserver.api.resources.metrics import Curve, MetricName, MetricNames, Metrics
from zeroserver.api.resources.models import Model, ModelAnswer, ModelPage, ModelVersion
from zeroserver.api.resources.queue import (
    Job,
    JobAnswer,
    JobPage,
    Pool,
    PoolAnswer,
    PoolPage,
    Quota,
    QuotaAnswer,
    QuotaPage,
)
from zeroserver.api.resources.search import (
    Bracket,
    PreviewAnswer,
    PreviewLength,
    Rung,
    RungEntry,
    SearcherAnswer,
    SearcherState,
    SearchEvent,
    SearchEvents,
    SearchHandled,
    SearchPreview,
)
from zeroserver.api.resources.server import Cluster, Health, Info, LoginLink, Token
from zeroserver.api.resources.submitted import (
    EngineAnswer,
    EngineEntry,
    ModelFile,
    ModelFilePage,
    SubmittedAnswer,
)
from zeroserver.api.resources.trials import Run, RunPage, Trial, TrialAnswer, TrialPage

__all__ = [
    "Agent",
    "AgentAnswer",
    "AgentPage",
    "BestCheckpoint",
    "BestCheckpointAnswer",
    "Bracket",
    "Checkpoint",
    "CheckpointAnswer",
    "CheckpointPage",
    "Cluster",
    "Curve",
    "EngineAnswer",
    "EngineEntry",
    "ErrorAnswer",
    "ErrorBody",
    "Experiment",
    "ExperimentAnswer",
    "ExperimentColumns",
    "ExperimentPage",
    "Health",
    "HparamShare",
    "Importance",
    "Improvement",
    "Info",
    "Job",
    "JobAnswer",
    "JobPage",
    "Log",
    "LogPage",
    "LoginLink",
    "MetricName",
    "MetricNames",
    "Metrics",
    "Model",
    "ModelAnswer",
    "ModelFile",
    "ModelFilePage",
    "ModelPage",
    "ModelVersion",
    "Pool",
    "PoolAnswer",
    "PoolPage",
    "PreviewAnswer",
    "PreviewLength",
    "Quota",
    "QuotaAnswer",
    "QuotaPage",
    "Removal",
    "RemovedCheckpoint",
    "Run",
    "RunPage",
    "Rung",
    "RungEntry",
    "SearchEvent",
    "SearchEvents",
    "SearchHandled",
    "SearchPreview",
    "SearchProgress",
    "SearcherAnswer",
    "SearcherState",
    "Slot",
    "SubmittedAnswer",
    "Token",
    "Trial",
    "TrialAnswer",
    "TrialColumns",
    "TrialPage",
]
