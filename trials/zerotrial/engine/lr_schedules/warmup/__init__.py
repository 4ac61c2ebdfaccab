"""Schedules with a warm-up: constant, decay, cosine, and a corrected linear one."""
