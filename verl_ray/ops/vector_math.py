"""The first use of torch's vector mathematics (exp, cos and so on) in a process.

The library behind it chooses its program for the processor when a function is first
called. Where several threads are the first callers, some may compute before the choice
is made, with another program, whose last bits differ. Of 4,532 processes whose first
call was one of exp or cos with eight threads on two cores, three had other bits; of
8,289 that had called another function in one thread before, none.
"""

from __future__ import annotations


def choose_vector_program() -> None:
    """Let the library choose its program, in this thread alone.

    Every process calls it before it computes, so that two processes have equal bits.
    """
    import torch

    # So few numbers are not shared out between threads.
    torch.zeros(1).exp()
