"""Rollout replicas, and experience: their responses together with the scores.

It may import `publishing`, what lies below it, and `workers` and `verl_ray`.
"""
