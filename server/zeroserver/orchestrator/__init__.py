"""State changes of experiments, trials and runs: searcher, scheduler and ingest.

Every change takes a :class:`~zeroserver.orchestrator.unit_of_work.UnitOfWork`. The database is the
truth; the caches of :class:`~zeroserver.orchestrator.state.Orchestrator` can be rebuilt from it.
"""
