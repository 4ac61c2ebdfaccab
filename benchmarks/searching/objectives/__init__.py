"""Objectives: closed forms and measured curves, by kind, and the measurement of the curves."""
