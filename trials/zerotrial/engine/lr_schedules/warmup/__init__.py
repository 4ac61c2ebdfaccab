"""Schedules that begin with a warm-up, by what comes after it; one wastes no step."""
