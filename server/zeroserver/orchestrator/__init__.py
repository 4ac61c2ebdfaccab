"""State changes of experiments, trials and runs: searcher, scheduler and ingest.

Every change runs in a :class:`~zeroserver.orchestrator.unit_of_work.UnitOfWork`. The database is
the source of truth; the caches of :class:`~zeroserver.orchestrator.state.Orchestrator` can be
rebuilt from it.
"""
