"""Episodes: how a policy acts in environments, and the rows that it learns from.

It may import `rewards` and `models`, and what lies below them.
"""
