"""Observation of training: progress lines, timers, operation counts, memory."""
