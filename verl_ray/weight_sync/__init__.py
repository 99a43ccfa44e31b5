"""Moving one policy version from a training group to rollout replicas: what, how much at once, and by which wire."""

SLOTS = 2
"""Buckets under way at once: one is filled while the other is read."""
