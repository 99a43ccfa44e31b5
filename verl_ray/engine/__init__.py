"""Training engines: one contract, interchangeable backends."""
