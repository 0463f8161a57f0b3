"""Losses: pure functions from a batch to additive numerators and denominators; no I/O in this room."""
