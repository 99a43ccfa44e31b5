"""Rewards: scores of responses by functions, services or judges, and their shaping.

Needs neither torch nor ray.

It may import `engine` and `cluster`, and what lies below them.
"""
