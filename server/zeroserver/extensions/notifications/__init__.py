"""Notifications: messages to webhooks and other channels about events of experiments."""
