"""verl_ray: the library of a distributed RLHF service on Ray, and its Python calls.

The library imports no role and no driver. `verl_ray.api` alone does, when it is called.
"""

from verl_ray.api import Run, check, evaluate, train
from verl_ray.api_types import Measurement, Result, Stopped
from verl_ray.errors import ConfigError, VerlRayError

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Measurement",
    "Result",
    "Run",
    "Stopped",
    "VerlRayError",
    "check",
    "evaluate",
    "train",
]
