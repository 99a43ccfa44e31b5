"""Pure functions on arrays and tensors: log-probs of a language-model head, divergence estimators, statistics; and what
a model over packed rows is asked and answers."""
