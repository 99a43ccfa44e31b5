"""Measures of a step: its time, memory, arithmetic and progress."""
