"""Defaults and limits of new experiments, of the installation and of projects."""
