"""Models: what they are called, where their parameters come from, how small ones are made."""
