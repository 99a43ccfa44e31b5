"""Rows in columns: the base type and its stages, rows by reference, their packing.

It may import `errors`, `ownership`, `disk`, `suggest`, `shell`, `json_lines` and
`user_files`.
"""
