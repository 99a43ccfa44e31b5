"""Commands of `verl-ray` in copies of a process that has already imported what they need.

A command that only reads files spends most of its time on imports. Deliberately not here:
`train`, whose driver is a process of its own anyway.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_PROGRAM = """
import json, os, sys

import controllers.command_line
import controllers.commands.check
import transformers
from controllers.__main__ import main

# transformers imports by names. The class is that of every tokenizer.
transformers.PreTrainedTokenizerFast

for line in sys.stdin:
    arguments, output = json.loads(line)
    copy = os.fork()
    if copy == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["verl-ray", *arguments]
        sys.exit(main())
    _, status = os.waitpid(copy, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class PreparedCommands:
    """Commands one after another; a context manager.

    Args:
        folder: Their current folder.
        environment: Their environment.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._output = folder / "output_of_command"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """Return the exit code of a command, and what it printed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = (list(arguments), str(self._output))
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, self._output.read_text()

    def __enter__(self) -> PreparedCommands:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.__exit__(kind, error, trace)
