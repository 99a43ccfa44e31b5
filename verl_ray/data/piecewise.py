"""A data file that is written piece by piece, and goes on after a stop.

Invariant: a piece is whole or is not there, and so is the file. What decides the
contents stands beside the pieces, so pieces of two requests never become one file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.data.files import as_jsonl
from verl_ray.disk import replace_file, sync
from verl_ray.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    import pyarrow as pa

_REQUEST = "request.json"


class PiecewiseFile:
    """A .jsonl or .parquet file, and the folder of its pieces until it is whole."""

    def __init__(self, path: Path, request: Mapping[str, object], key: str) -> None:
        """Begin the file, or go on where an earlier process has stopped.

        Args:
            path: The file, which does not exist.
            request: All that its contents follow from, as JSON has it.
            key: The setting that names the file.

        Raises:
            ConfigError: There are pieces of another request.
        """
        self.path = path
        self._folder = path.with_name(f"{path.name}.partial")
        request = json.loads(json.dumps(request))
        beginning = self._folder / _REQUEST
        if beginning.is_file():
            earlier = json.loads(beginning.read_text())
            if earlier != request:
                raise ConfigError([_other_request(key, self._folder, earlier, request)])
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(beginning, json.dumps(request, indent=1).encode())

    def __contains__(self, number: int) -> bool:
        """Whether a piece is there."""
        return self._piece(number).is_file()

    def write(self, number: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a piece.

        Raises:
            DataError: The format has no such values.
        """
        if self.path.suffix == ".jsonl":
            replace_file(self._piece(number), as_jsonl(records))
            return

        import pyarrow as pa
        import pyarrow.parquet

        try:
            table = pa.Table.from_pylist(list(records))
        except pa.ArrowException as error:
            raise _not_tabular(self.path, error) from error
        sink = pa.BufferOutputStream()
        pyarrow.parquet.write_table(table, sink)
        replace_file(self._piece(number), sink.getvalue().to_pybytes())

    def finish(self, num_pieces: int) -> None:
        """Make the file of all pieces, in their order, and remove them.

        Raises:
            DataError: Records of different pieces do not fit into one table.
        """
        pieces = [self._piece(number) for number in range(num_pieces)]
        part = self._folder / f"whole{self.path.suffix}"
        if self.path.suffix == ".jsonl":
            with part.open("wb") as file:
                for piece in pieces:
                    with piece.open("rb") as content:
                        shutil.copyfileobj(content, file)
        else:
            _join_tables(pieces, part)

        # The content is on the disk before the name points to it.
        sync(part)
        part.replace(self.path)
        sync(self.path.parent)
        shutil.rmtree(self._folder)

    def _piece(self, number: int) -> Path:
        return self._folder / f"{number:06d}{self.path.suffix}"


def _join_tables(pieces: Sequence[Path], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    schemas: list[pa.Schema] = []
    for piece in pieces:
        schema = pyarrow.parquet.read_schema(piece)
        # A piece without records has no columns.
        if len(schema):
            schemas.append(schema)

    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            for piece in pieces:
                table = pyarrow.parquet.read_table(piece)
                if table.num_rows:
                    empty = schema.empty_table()
                    options = {"promote_options": "permissive"}
                    writer.write_table(pa.concat_tables([empty, table], **options))
    except pa.ArrowException as error:
        raise _not_tabular(path, error) from error


def _not_tabular(path: Path, error: Exception) -> DataError:
    return DataError(
        f"the records fit into no table ({error})",
        fix="let the name of the file end in .jsonl",
        place=path,
    )


def _other_request(
    key: str, folder: Path, earlier: Mapping[str, object], request: Mapping[str, object]
) -> Problem:
    """Return the problem of pieces that another request has left."""
    different = [
        name
        for name in {**earlier, **request}
        if earlier.get(name) != request.get(name)
    ]
    rule = (
        f"{folder} has responses of an earlier command with other settings"
        f" ({', '.join(different)}), which would be mixed with those of this one"
    )
    fix = "Go on with those settings, remove the folder, or name another file."
    return Problem(key, str(folder.with_suffix("")), rule, fix)
