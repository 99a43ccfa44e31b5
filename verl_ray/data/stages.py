"""The earlier path of `verl_ray/columns/stages.py`, which code of users may import."""

from verl_ray.columns.stages import *  # noqa: F403
