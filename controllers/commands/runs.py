"""The command `runs`: a list of the runs in a folder.

Invariant: the runs are asked nothing, so their folders are enough, and neither torch
nor ray is imported. A run that cannot be read is listed with what is wrong, and hides
no other.
"""

from __future__ import annotations

import argparse
import sys

from rich.table import Table

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import OUTPUTS, typed_path
from verl_ray.report.record import RunRecord, read_run
from verl_ray.tracking.held_out_names import label_of
from verl_ray.tracking.history import wall_s
from verl_ray.tracking.printed_report import plain_console

_REWARD = "critic/rewards/mean"


def main(argv: list[str]) -> int:
    """Print the runs in a folder.

    Raises:
        ConfigError: There is no such folder.
    """
    arguments = _parser().parse_args(argv)
    folder = typed_path("FOLDER", arguments.folder)
    if not folder.is_dir():
        fix = "Name the folder that holds the folders of runs."
        rule = "there is no such folder"
        raise ConfigError([Problem("FOLDER", arguments.folder, rule, fix)])

    # A sweep has its runs one level below.
    paths = [*folder.glob("*/config.yaml"), *folder.glob("*/*/config.yaml")]
    rows: list[tuple[float, tuple[str, ...]]] = []
    for path in sorted(paths):
        # The lines of a long run take much memory, so one record is held at a time.
        run = read_run(path.parent)
        name = str(run.folder.relative_to(folder))
        begun_s = run.segments[0].begun_s if run.segments else 0.0
        rows.append((begun_s, (name, run.state, _steps(run), _time(run), _result(run))))
    if not rows:
        print(f"{folder} holds no runs")
        return 0

    # The one that began last stands last, next to the prompt of the terminal.
    rows.sort(key=lambda row: row[0])
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("steps", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("result", overflow="fold")
    for _, cells in rows:
        table.add_row(*cells)
    plain_console(sys.stdout, None).print(table)
    return 0


def _steps(run: RunRecord) -> str:
    return f"{run.step}" if run.total_steps is None else f"{run.step}/{run.total_steps}"


def _time(run: RunRecord) -> str:
    seconds = round(wall_s(list(run.segments)))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds % 60:02}s"


def _result(run: RunRecord) -> str:
    """Return the main held-out metric before, now and at its best, or the reward."""
    if run.damage:
        return run.damage[0]
    if run.held_out:
        course = run.held_out[0]
        first, last, best = min(course.values), max(course.values), course.best_step
        text = f"{course.values[last]:.4g} at step {last}"
        if last != first:
            text = f"{course.values[first]:.4g} -> {text}"
        if best != last:
            text += f", best {course.values[best]:.4g} at step {best}"
        return f"{label_of(course.metric)} {text}"

    rewards = [line[_REWARD] for line in run.lines if _REWARD in line]
    return f"reward {rewards[-1]:.4g}" if rewards else "-"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray runs",
        description=(
            "Print the runs in a folder, the newest one last: how each stands, how far"
            " it is, and its main held-out metric before the first step, now and"
            " at its best. Nothing is started or changed."
        ),
        epilog=f"examples:\n  verl-ray runs\n  verl-ray runs {OUTPUTS}/sweep\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        default=str(OUTPUTS),
        metavar="FOLDER",
        help=f"the folder; {OUTPUTS} without it",
    )
    return parser
