"""The earlier path of `verl_ray/columns/batch.py`, which code of users may import."""

from verl_ray.columns.batch import *  # noqa: F403
