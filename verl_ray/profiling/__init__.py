"""Measures of a step: its time, memory, arithmetic and progress.

It may import `errors`, `ownership`, `disk`, `suggest`, `shell`, `json_lines` and
`user_files`.
"""
