"""Rows in columns: the base type and its stages, rows by reference, their packing.

Of verl_ray they import `errors` alone.
"""
