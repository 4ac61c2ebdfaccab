"""Continuation of ended experiments with changes: `zerolab experiment continue`."""
