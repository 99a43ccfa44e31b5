"""What one step does, by task: reinforcement learning, supervised learning, reward models; and the warm start."""
