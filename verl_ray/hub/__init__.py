"""Models and data sets of the hub: their commits, and their files in the cache.

Invariant: a run reads files of one commit, which its configuration records. Nothing but
the cache of `huggingface_hub` is written, and no code of a repository is run.

It may import `config`, and what lies below it.
"""
