"""Autotuning: search for the engine settings that train a model fastest on this machine."""
