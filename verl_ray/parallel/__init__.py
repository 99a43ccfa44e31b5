"""The partition of a micro-batch's tokens over the ranks that compute it together.

It may import `settings`, `columns`, `ops`, `paths`, `profiling`, `private_files`,
`rendezvous` and `processes`, and what lies below them.
"""
