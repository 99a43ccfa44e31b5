"""Forms and values of settings, which are known before there is a configuration.

Sections and their rules, names of functions, ids of the hub, values of a config.json,
ends of episodes.

It may import `errors`, `ownership`, `disk`, `suggest`, `shell`, `json_lines` and
`user_files`.
"""
