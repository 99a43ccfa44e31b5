"""The parts of a reinforcement-learning algorithm: advantages, losses, aggregation, and
corrections, without a configuration.

It may import `settings`, `columns` and `ops`, and what lies below them.
"""
