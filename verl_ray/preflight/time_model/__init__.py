"""The time model: estimated seconds of a step, by stated assumptions."""
