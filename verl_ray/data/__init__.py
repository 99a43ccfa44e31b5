"""Records of files as rows of tokens: read, drawn, and what became of each.

It may import `weight_sync`, `hub` and `learning`, and what lies below them.
"""
