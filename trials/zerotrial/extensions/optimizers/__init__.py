"""Optimizers that few use: Lion, LAMB, and Muon with AdamW."""
