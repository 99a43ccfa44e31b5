"""Proofs that this project computes a model as its family's own code does.

It may import `report`, `rollout`, `engine` and `cluster`, and what lies below them.
"""
