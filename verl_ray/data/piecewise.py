"""A data file that is written piece by piece, and goes on after a stop.

Invariant: a piece is whole or is not there, and so is the file. What decides the
contents stands beside the pieces, so pieces of two requests never become one file, and
one process at a time writes them. Pieces are lines of JSON, whatever the format of the
file, so they stay of use where another format is chosen in the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from verl_ray.data.files import as_jsonl
from verl_ray.disk import replace_file, sync
from verl_ray.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    import pyarrow as pa

_REQUEST = "request.json"


class PiecewiseFile:
    """A .jsonl or .parquet file, and the folder of its pieces until it is whole."""

    def __init__(self, path: Path, request: Mapping[str, object], key: str) -> None:
        """Name the file; nothing is written.

        Args:
            path: The file, which does not exist.
            request: All that its contents follow from, as JSON has it.
            key: The setting that names the file.
        """
        self.path = path
        self._key = key
        self._request: dict[str, object] = json.loads(json.dumps(request))
        # The same pieces serve either format.
        self._folder = path.with_name(f"{path.stem}.partial")
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Begin the file, or go on where an earlier process has stopped.

        Raises:
            ConfigError: There are pieces of another request, or another process writes
                them.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin()
        except BlockingIOError:
            self.__exit__()
            rule = f"another process writes to {self._folder}"
            fix = "Wait for it, or name another file."
            raise ConfigError([Problem(self._key, str(self.path), rule, fix)]) from None
        except OSError as error:
            self.__exit__()
            rule = f"its pieces cannot be written ({error})"
            fix = "Name a file on a disk that has space, and lets you write."
            raise ConfigError([Problem(self._key, str(self.path), rule, fix)]) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Write the request, or compare it with that of the pieces that are there."""
        beginning = self._folder / _REQUEST
        pieces = list(self._folder.glob("*.jsonl"))
        if pieces and beginning.is_file():
            self._require_same(json.loads(beginning.read_text()))
            return
        # Nobody knows what pieces without a request are of.
        for piece in pieces:
            piece.unlink()
        replace_file(beginning, json.dumps(self._request, indent=1).encode())

    def __exit__(self, *_: object) -> None:
        """Let another process go on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __contains__(self, number: int) -> bool:
        """Whether a piece is there."""
        return self._piece(number).is_file()

    def write(self, number: int, records: Iterable[Mapping[str, Any]]) -> int:
        """Write a piece, record by record; return how many there are."""
        piece = self._piece(number)
        part = piece.with_suffix(".part")
        count = 0
        with part.open("wb") as file:
            for record in records:
                file.write(as_jsonl([record]))
                count += 1
        sync(part)
        part.replace(piece)
        sync(self._folder)
        return count

    def finish(self, num_pieces: int) -> None:
        """Make the file of all pieces, in their order, and remove them.

        Raises:
            DataError: The records do not fit into one table.
        """
        pieces = [self._piece(number) for number in range(num_pieces)]
        part = self._folder / f"whole{self.path.suffix}"
        if self.path.suffix == ".jsonl":
            with part.open("wb") as file:
                for piece in pieces:
                    with piece.open("rb") as content:
                        shutil.copyfileobj(content, file)
        else:
            self._write_table(pieces, part)

        # The content is on the disk before the name points to it.
        sync(part)
        part.replace(self.path)
        sync(self.path.parent)
        # Without its request no piece is taken for one of another file.
        (self._folder / _REQUEST).unlink()
        shutil.rmtree(self._folder)

    def _write_table(self, pieces: Sequence[Path], path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        try:
            # A field may be absent from some records, and hold other types in others.
            schemas = [
                table.schema for piece in pieces for table in _tables(piece, None)
            ]
            schema = pa.schema([])
            if schemas:
                schema = pa.unify_schemas(schemas, promote_options="permissive")
            with pyarrow.parquet.ParquetWriter(path, schema) as writer:
                for piece in pieces:
                    for table in _tables(piece, schema):
                        writer.write_table(table)
        except pa.ArrowException as error:
            raise DataError(
                f"the records fit into no table ({error}); what is generated stays in"
                f" {self._folder}",
                fix=f"type the same command with {self._key}"
                f" {self.path.with_suffix('.jsonl')}",
                place=self.path,
            ) from error

    def _piece(self, number: int) -> Path:
        return self._folder / f"{number:06d}.jsonl"

    def _require_same(self, earlier: Mapping[str, object]) -> None:
        """Raise ConfigError if the pieces are those of another request."""
        both = {**earlier, **self._request}
        different = [
            f"{name} was {_short(earlier.get(name))} and is"
            f" {_short(self._request.get(name))}"
            for name in both
            if earlier.get(name) != self._request.get(name)
        ]
        if not different:
            return
        rule = (
            f"{self._folder} has responses of an earlier command, which would be mixed"
            f" with those of this one: {'; '.join(different)}"
        )
        fix = "Go on with those settings, remove the folder, or name another file."
        raise ConfigError([Problem(self._key, str(self.path), rule, fix)])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tables(piece: Path, schema: pa.Schema | None) -> Iterator[pa.Table]:
    """Yield the records of a piece as tables; none of a piece without records.

    Args:
        piece: The piece.
        schema: The columns; None takes all that a record of the table has.
    """
    import pyarrow as pa

    with piece.open("rb") as file:
        while lines := file.readlines(_BYTES_AT_ONCE):
            records = list(map(json.loads, lines))
            if schema is None:
                names = dict.fromkeys(name for record in records for name in record)
                columns = {
                    name: [record.get(name) for record in records] for name in names
                }
                yield pa.table(columns)
            else:
                yield pa.Table.from_pylist(records, schema=schema)


_BYTES_AT_ONCE = 16 * 2**20
