"""Orchestrator of experiments: state changes of trials and runs in the writer's transactions.

Every decision is a function of a :class:`~zeroserver.store.database.Transaction` and the
:class:`~zeroserver.orchestrator.state.World`. The database is the truth; what the world keeps in
memory can be made anew from it at any moment.
"""
