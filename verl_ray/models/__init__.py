"""Models of Hugging Face: their computation, and reading and writing them."""
