"""Rows in columns: the base type and its stages, rows by reference, their packing.

It may import `paths`, `profiling`, `private_files`, `rendezvous`, `processes`, and what
lies below them.
"""
