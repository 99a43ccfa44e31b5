"""Algorithms as a configuration chooses them: credit, losses, corrections.

The functions are in `verl_ray/algorithms`; here they meet the section `algorithm`.

It may import `config`, and what lies below it.
"""
