"""Settings of the correction and of the limit on the mismatch, for tests that build an
algorithm by hand.
"""

from __future__ import annotations

from typing import Any

from verl_ray.config.algorithm import CorrectionConfig, MismatchConfig

NO_CORRECTION = CorrectionConfig(
    normalise=False,
    rejections=None,
    form="none",
    kind=None,
    level=None,
    lower=None,
    upper=None,
)
NO_LIMIT = MismatchConfig(metric=None, limit=None, then=None)


def corrected(**settings: Any) -> CorrectionConfig:
    """Return a correction with these settings, and no others."""
    return CorrectionConfig.model_validate({**NO_CORRECTION.model_dump(), **settings})
