"""verl_ray: the library of a distributed RLHF service on Ray, and its Python calls.

The library imports no role and no driver. The calls are those of
`controllers/python_api`, which is imported when one of them is asked for; what they
need is imported when they are called.
"""

from typing import TYPE_CHECKING, Any

from verl_ray.errors import ConfigError, VerlRayError

if TYPE_CHECKING:
    from controllers.python_api.calls import Run, check, evaluate, train
    from controllers.python_api.contract import Measurement, Result, Stopped

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


def __getattr__(name: str) -> Any:
    """Return a call, or a type of its results."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from controllers.python_api import calls

    value = globals()[name] = getattr(calls, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
