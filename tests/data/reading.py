"""Records of a small data set, read as a run reads them."""

from __future__ import annotations

from pathlib import Path

from verl_ray.config.data import DataSet
from verl_ray.data.records import (
    PreferenceRecord,
    SupervisedRecord,
    preference_reading,
    read_records,
    supervised_reading,
)


def read_preferences(source: str | Path | DataSet) -> list[PreferenceRecord]:
    """Read the preference records of a set, in its order."""
    return read_records(source, preference_reading)


def read_supervised(source: str | Path | DataSet) -> list[SupervisedRecord]:
    """Read the supervised records of a set, in its order."""
    return read_records(source, supervised_reading)
