"""Rewards: scores of responses by functions, services or judges, and their shaping.

Needs neither torch nor ray.

It may import `data`, and what lies below it.
"""
