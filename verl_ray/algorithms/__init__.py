"""The parts of a reinforcement-learning algorithm: advantages, losses, aggregation, and
corrections, without a configuration.
"""
