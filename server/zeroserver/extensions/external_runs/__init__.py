"""Runs outside of the scheduler: reported live from any machine, or sent later."""
