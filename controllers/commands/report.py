"""The command `report`: what runs did, as one HTML file, or as a page that follows one.

Invariant: the runs are asked nothing, so their folders are enough, wherever they are,
and neither torch nor ray is imported.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import OUTPUTS, RUN_HELP, run_folder, shown_path, typed_path
from verl_ray.report.serve import LOOPBACK, is_loopback, serve
from verl_ray.tracking.report import PAGE, write_report

TOKEN = "VERL_RAY_REPORT_TOKEN"
"""Environment variable with what a browser has to show where others reach the page."""


def main(argv: list[str]) -> int:
    """Write the report of some runs, or serve that of one.

    Raises:
        ConfigError: There is no such run, or the report cannot be written or served.
    """
    arguments = _parser().parse_args(argv)
    folders = [run_folder(run) for run in arguments.runs]
    if arguments.serve:
        if arguments.output is not None:
            _refuse("--output", arguments.output, "writes no file beside --serve")
        return _serve(folders, arguments.host, arguments.port)

    default = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    output = default
    if arguments.output is not None:
        output = typed_path("--output", arguments.output)
    try:
        write_report(folders, output)
    except OSError as error:
        fix = "Name a file in a folder that can be written."
        problem = Problem("--output", str(output), f"cannot be written: {error}", fix)
        raise ConfigError([problem]) from error
    print(f"report: {shown_path(output.absolute())}")
    return 0


def _serve(folders: list[Path], host: str, port: int) -> int:
    token = os.environ.get(TOKEN, "")
    if not is_loopback(host) and not token:
        rule = f"{TOKEN} is not set, and others can reach this address"
        fix = f"Set {TOKEN} to a long random text, or leave out --host."
        raise ConfigError([Problem("--host", host, rule, fix)])
    try:
        serve(folders, host, port, token)
    # A port beyond the largest one overflows.
    except (OSError, OverflowError) as error:
        rule = f"no server can listen at {host}, port {port}: {error}"
        fix = "Name another --port; 0 stands for any that is free."
        raise ConfigError([Problem("--port", port, rule, fix)]) from error
    return 0


def _refuse(option: str, value: str, rule: str) -> None:
    raise ConfigError([Problem(option, value, rule, "Leave out one of them.")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray report",
        description=(
            "Write what runs did to one HTML file that makes no request: state,"
            " findings, curves, prompts and responses, time and memory. It is made from"
            " their folders alone, also of runs that go on or have crashed. Several"
            " runs are laid over each other. Nothing is started or changed."
        ),
        epilog=(
            "examples:\n"
            f"  verl-ray report {OUTPUTS}/first\n"
            "  verl-ray report first second --output both.html\n"
            "  verl-ray report --serve first\n\n"
            "Where --host is not of this machine alone, the environment variable\n"
            f"{TOKEN} has the token that the address of the page has to end with:\n"
            "http://HOST:PORT/?token=TOKEN\n\n"
            "exit codes:\n"
            "  0  the report is written, or was served until it was stopped\n"
            "  2  there is no such run, or the report cannot be written or served\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the file; without it {PAGE} in the run's folder, or here for several",
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page, and follow the runs"
    )
    parser.add_argument("--host", default=LOOPBACK, help="address to listen at")
    parser.add_argument("--port", type=int, default=8200, help="port to listen at")
    return parser
