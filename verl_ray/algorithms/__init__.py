"""What makes a reinforcement-learning algorithm: advantages, losses, aggregation, control of the divergence."""
