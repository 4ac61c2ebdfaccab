"""Checks of configuration files: source of models, torch, pipelines, other platforms, YAML."""
