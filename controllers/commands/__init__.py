"""One file per command of `verl-ray`: what it does, from a checked configuration to an exit code."""
