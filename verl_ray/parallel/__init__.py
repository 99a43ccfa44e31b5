"""How the ranks of one role stand to each other."""
