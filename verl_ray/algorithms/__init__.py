"""The parts of a reinforcement-learning algorithm: advantages, losses, aggregation, and
corrections, without a configuration.

It may import `settings`, `columns`, `ops`, `paths`, `profiling`, `private_files`,
`rendezvous` and `processes`, and what lies below them.
"""
