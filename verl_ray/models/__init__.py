"""Models of Hugging Face: their computation, and reading and writing them.

It may import `data` and `weight_sync`, and what lies below them.
"""
