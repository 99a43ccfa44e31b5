"""Records of small data sets, read as a run reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from verl_ray.config.data import DataSet
from verl_ray.data.files import read_rows
from verl_ray.data.records import (
    PreferenceRecord,
    Reading,
    SupervisedRecord,
    preference_reading,
    supervised_reading,
)

Record = TypeVar("Record")


def read_supervised(source: str | Path | DataSet) -> list[SupervisedRecord]:
    """Read the supervised records of a set, in its order."""
    return _read(source, supervised_reading)


def read_preferences(source: str | Path | DataSet) -> list[PreferenceRecord]:
    """Read the preference records of a set, in its order."""
    return _read(source, preference_reading)


def _read(
    source: str | Path | DataSet,
    reading_of: Callable[[DataSet, dict[str, object], str], Reading[Record]],
) -> list[Record]:
    data_set = source if isinstance(source, DataSet) else DataSet(str(source))
    rows = list(read_rows(data_set))
    reading = reading_of(data_set, rows[0][1], rows[0][0])
    return [reading.record(where, fields) for where, fields in rows]
