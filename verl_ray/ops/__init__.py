"""Pure functions on arrays and tensors, and the outputs of a model over packed rows.

The functions are log-probs of a language-model head, estimators of a divergence, and
statistics.

It may import `paths`, `profiling`, `private_files`, `rendezvous`, `processes`, and what
lies below them.
"""
