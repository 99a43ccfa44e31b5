"""What one step does, by task: reinforcement learning, supervised learning and reward models."""
