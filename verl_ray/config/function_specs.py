"""Forms in which a setting names a reward function, told apart by their spelling.

Invariant: nothing is looked up. Deliberately not here: whether there is such a function
(`verl_ray/rewards/specs.py`).
"""

from __future__ import annotations

import re

PICKLE = ".pkl"
"""Ending of the path of a function that cloudpickle has written."""

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def names_module(spec: str) -> bool:
    """Return whether a spec is of the form `package.module:function`."""
    module, colon, _ = spec.rpartition(":")
    is_dotted = _MODULE.fullmatch(module) is not None
    return bool(colon) and is_dotted and not module.endswith(".py")
