"""Folder for the search path of scripts: the module `wandb`."""
