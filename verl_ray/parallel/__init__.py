"""Parallelism within a role: which rows and which tokens each of its ranks computes."""
