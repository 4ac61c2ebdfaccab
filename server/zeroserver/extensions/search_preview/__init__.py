"""Estimate of a search's trials and cost: `zerolab experiment preview`, and its route."""
