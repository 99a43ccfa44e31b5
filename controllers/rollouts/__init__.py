"""Rollout replicas, and experience: their responses together with the scores."""
