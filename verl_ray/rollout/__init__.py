"""Rollout engines, which continue token sequences.

Token ids go in; sampled tokens, their log-probs and policy versions come out.

It may import `tracking`, `agents` and `checkpoint`, and what lies below them.
"""
