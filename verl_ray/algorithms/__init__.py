"""The parts of a reinforcement-learning algorithm: advantages, losses, aggregation, and
control of the divergence.
"""
