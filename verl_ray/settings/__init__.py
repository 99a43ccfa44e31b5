"""Forms and values of settings, which are known before there is a configuration.

Sections and their rules, names of functions, ids of the hub, values of a config.json,
ends of episodes.

It may import `paths`, `profiling`, `private_files`, `rendezvous`, `processes`, and what
lies below them.
"""
