"""Learning-rate schedules that few use: one cycle, and a range test."""
