"""The earlier path of `verl_ray/columns/batch.py`."""

from verl_ray.columns.batch import *  # noqa: F403
