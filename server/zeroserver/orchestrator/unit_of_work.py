"""Unit of work: one database transaction with all services."""

from zeroserver.orchestrator.checkpoints.checkpoint_service import CheckpointService
from zeroserver.orchestrator.cluster.agent_service import AgentService
from zeroserver.orchestrator.continuation import ContinuationService
from zeroserver.orchestrator.exit_service import ExitService
from zeroserver.orchestrator.experiment_service import ExperimentService
from zeroserver.orchestrator.ingest.log_service import LogService
from zeroserver.orchestrator.ingest.metric_names import MetricNameService
from zeroserver.orchestrator.ingest.metric_retention import MetricRetentionService
from zeroserver.orchestrator.ingest.report_service import ReportService
from zeroserver.orchestrator.node_service import NodeService
from zeroserver.orchestrator.orphans import OrphanService
from zeroserver.orchestrator.periodic import PeriodicService
from zeroserver.orchestrator.run_service import RunService
from zeroserver.orchestrator.scheduling import SchedulingService
from zeroserver.orchestrator.search.operation_service import OperationService
from zeroserver.orchestrator.search.search_service import SearchService
from zeroserver.orchestrator.service import DomainTransaction, Uses
from zeroserver.orchestrator.trial_service import TrialService

__all__ = ["UnitOfWork"]


class UnitOfWork(DomainTransaction):
    """Transaction with all services, for routes and periodic work."""

    experiments = Uses(ExperimentService)
    trials = Uses(TrialService)
    operations = Uses(OperationService)
    runs = Uses(RunService)
    exits = Uses(ExitService)
    nodes = Uses(NodeService)
    searches = Uses(SearchService)
    continuations = Uses(ContinuationService)
    scheduling = Uses(SchedulingService)
    periodic = Uses(PeriodicService)
    agents = Uses(AgentService)
    checkpoints = Uses(CheckpointService)
    reports = Uses(ReportService)
    logs = Uses(LogService)
    orphans = Uses(OrphanService)
    metric_names = Uses(MetricNameService)
    metric_retention = Uses(MetricRetentionService)
