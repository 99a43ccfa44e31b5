"""Checks of a run's needs before anything starts.

They compare the configuration with the models' files and with the machine.

It may import `proofs`, and what lies below it.
"""
