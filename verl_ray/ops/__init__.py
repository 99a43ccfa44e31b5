"""Pure functions on arrays and tensors, and the outputs of a model over packed rows.

The functions are log-probs of a language-model head, estimators of a divergence, and
statistics.

It may import `errors`, `ownership`, `disk`, `suggest`, `shell`, `json_lines` and
`user_files`.
"""
