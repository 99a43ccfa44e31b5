"""The earlier path of `verl_ray/columns/stages.py`."""

from verl_ray.columns.stages import *  # noqa: F403
