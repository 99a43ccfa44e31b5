"""Child processes that run users' code, and what is lost with one that ends.

Everything here is used by several rooms.

It may import `errors`, `ownership`, `disk`, `suggest`, `shell`, `json_lines` and
`user_files`, and no framework.
"""
