"""Preferences of a small data set, read as a run reads them."""

from __future__ import annotations

from pathlib import Path

from verl_ray.config.data import DataSet
from verl_ray.data.records import PreferenceRecord, preference_reading, read_records


def read_preferences(source: str | Path | DataSet) -> list[PreferenceRecord]:
    """Read the preference records of a set, in its order."""
    return read_records(source, preference_reading)
