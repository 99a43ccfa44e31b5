"""Settings of the correction and of the limit on the mismatch, for tests that build an
algorithm by hand.
"""

from __future__ import annotations

from verl_ray.config.algorithm import CorrectionConfig, MismatchConfig

NO_CORRECTION = CorrectionConfig(
    form="none", kind=None, level=None, lower=None, upper=None
)
NO_LIMIT = MismatchConfig(metric=None, limit=None, then=None)
