"""The line of `check --rates`: how long trainers and rollout engines are idle.

Invariant: the line says whether its seconds were given, or measured in a run. No second
is predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_ray.config.rollout import ScheduleName
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem, TrackingError
from verl_ray.tracking.jsonl import METRICS, read_metrics

OPTION = "--rates"
EXAMPLE = "generate=30,train=25"

_PARTS = ("generate", "train", "publish")
_NEEDED = ("generate", "train")
_MEASURED = (
    "timing_s/step",
    "timing_s/update_weights",
    "timing_s/rollouts",
    "perf/trainers_idle",
)
_FIRST_STEPS = 1
"""Steps that are left out, since processes warm up in them."""


def parse_rates(text: str) -> PoolTimes:
    """Return the seconds of a step that a text gives, or that a run has measured.

    Args:
        text: Such as "generate=30,train=25,publish=2", in seconds, or the folder of a
            run.

    Raises:
        ConfigError: The text is neither, or the run has not measured them.
    """
    if "=" not in text:
        return _measured(Path(text))

    seconds: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds[name] = float(value)
        except ValueError:
            seconds[name] = -1.0
        if name not in _PARTS or not seconds[name] >= 0:
            raise _refused(part, f"expected seconds of {', '.join(_PARTS)}")
    missing = [name for name in _NEEDED if not seconds.get(name)]
    if missing:
        raise _refused(text, f"the seconds of {' and '.join(missing)} are missing")
    return _times(seconds, "given")


def _measured(folder: Path) -> PoolTimes:
    """Return the median over the steps of a run."""
    try:
        lines = read_metrics(folder / METRICS)
    except TrackingError as error:
        raise _refused(str(folder), f"it is no run: {error}") from None
    steps = [line for line in lines if all(name in line for name in _MEASURED)]
    steps = steps[_FIRST_STEPS:] or steps
    if not steps:
        rule = f"no step of this run has {', '.join(_MEASURED)}"
        raise _refused(str(folder), rule)

    seconds = {
        # Engines also generate between the steps, while the policy is evaluated.
        "generate": [line["timing_s/rollouts"] for line in steps],
        "train": [
            (1 - line["perf/trainers_idle"]) * line["timing_s/step"]
            - line["timing_s/update_weights"]
            for line in steps
        ],
        "publish": [line["timing_s/update_weights"] for line in steps],
    }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return _times(medians, f"measured in {folder}")


def _times(seconds: Mapping[str, float], origin: str) -> PoolTimes:
    return PoolTimes(
        seconds["generate"], seconds["train"], seconds.get("publish", 0.0), origin
    )


def _refused(value: str, rule: str) -> ConfigError:
    fix = f"Write {OPTION} {EXAMPLE}, or {OPTION} outputs/RUN."
    return ConfigError([Problem(OPTION, value, rule, fix)])


def pool_lines(config: Config, times: PoolTimes | None) -> list[str]:
    """Return how long a step takes and how long each pool is idle, in words.

    Args:
        config: Resolved configuration.
        times: What the user has given; None for nothing, of which nothing is said.
    """
    if times is None or not isinstance(config, RLConfig):
        return []

    schedule = config.rollout.schedule
    use = pool_use(schedule, times)
    # Open rows go on after the update, or the trainers wait for the last one.
    bound = {"carry_over": "at most ", "one_step_off": "at least "}.get(schedule, "")
    return [
        f"schedule={schedule}: a step takes {bound}{use.step_s:.3g} s; trainers are"
        f" idle for {100 * use.trainers_idle:.0f} % of it, rollout engines for"
        f" {100 * use.engines_idle:.0f} % ({times.origin}: {times.generate_s:.3g} s of"
        f" generation, {times.train_s:.3g} s of training, {times.publish_s:.3g} s of"
        " publishing)"
    ]


# -------------------------------------------------------------------------- idle shares


@dataclass(frozen=True)
class PoolTimes:
    """Seconds of a step in which each pool works.

    Attributes:
        generate_s: Generation of the responses of a step.
        train_s: All that trainers do with them.
        publish_s: The weight sync, during which neither pool works.
        origin: Where the figures come from, in words.
    """

    generate_s: float
    train_s: float
    publish_s: float
    origin: str


@dataclass(frozen=True)
class PoolUse:
    """A step as a schedule makes it."""

    step_s: float
    trainers_idle: float
    """Share of the step in which the trainers do not work."""
    engines_idle: float
    """Share of the step in which the engines do not work."""


def pool_use(schedule: ScheduleName, times: PoolTimes) -> PoolUse:
    """Return how long a step takes, and how long each pool is idle.

    Pools that overlap wait for the slower one. Where they take turns, their times add
    up; for `carry_over` this is an upper bound, since later batches are begun before.
    """
    work_s = times.generate_s + times.train_s
    if schedule in ("one_step_off", "asynchronous"):
        work_s = max(times.generate_s, times.train_s)
    step_s = work_s + times.publish_s
    return PoolUse(
        step_s,
        trainers_idle=1 - times.train_s / step_s,
        engines_idle=1 - times.generate_s / step_s,
    )
