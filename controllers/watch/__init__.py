"""Metrics of a run, and the limits on them that stop it."""
