"""Rules of a run as a whole: its name and folder, resuming, evaluating, checkpoints, tracking.

Invariant: a setting of something that the run does not do is refused. Deliberately not here: files that must be there
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.schema import Config
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.tasks.rl import RLConfig
    from verl_ray.config.tasks.sft import SFTConfig


def run_has_a_name(config: Config, _: Overridden) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", config.run.name) or config.run.name in (".", ".."):
        fix = "Use letters, digits, dots, - and _ ; run.dir takes a path."
        yield Problem("run.name", config.run.name, "the name of a run is also the name of its folder", fix)
    if not config.run.dir.strip():
        yield Problem("run.dir", config.run.dir, "the run needs a folder to write to", "Use outputs/NAME.")


def resume_is_a_choice_or_a_path(config: Config, _: Overridden) -> Iterator[Problem]:
    resume = config.run.resume
    if resume.strip() == "" or (resume not in ("auto", "none") and resume.lower() in ("auto", "none", "true", "false")):
        yield Problem("run.resume", resume, "no such choice", "Use auto, none, or the path of a checkpoint.")


def evaluation_has_data(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.data.validation_path is not None:
        return
    if overridden.evaluates:
        yield Problem(
            "data.validation_path", None, "an evaluation needs held-out problems", "Set data.validation_path to a file."
        )
    elif config.run.evaluate_every:
        yield Problem(
            "data.validation_path",
            None,
            f"run.evaluate_every={config.run.evaluate_every} needs held-out problems",
            "Set data.validation_path to a file, or run.evaluate_every=0.",
        )


def evaluation_is_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.run.evaluate_every == 0 and not overridden.evaluates:
        yield from ignored(overridden.under("evaluation"), config, "run.evaluate_every=0 turns evaluation off")


def held_out_deadline_is_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.evaluation.functions is None:
        keys = overridden.under("evaluation.deadline_s")
        yield from ignored(keys, config, "evaluation.functions=null leaves grading to the reward, with its deadline")


def greedy_evaluation_needs_one_response(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.evaluation.temperature == 0 and config.evaluation.group_size > 1:
        rule = "with evaluation.temperature=0 all responses to a problem are the same"
        fix = "Use 1, or a temperature above 0."
        yield Problem("evaluation.group_size", config.evaluation.group_size, rule, fix)


def stopping_is_measured(config: SFTConfig, _: Overridden) -> Iterator[Problem]:
    if config.sft.stop_at_accuracy is not None and config.run.evaluate_every == 0:
        rule = "the accuracy is measured by evaluating, and run.evaluate_every=0 turns that off"
        fix = "Use null, or run.evaluate_every=10."
        yield Problem("sft.stop_at_accuracy", config.sft.stop_at_accuracy, rule, fix)


def checkpoints_are_kept(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.run.checkpoint_every == 0:
        reason = "run.checkpoint_every=0 writes no checkpoints"
        for key in ("run.keep_checkpoints", "run.checkpoint_behind"):
            yield from ignored(overridden.under(key), config, reason)


def wandb_settings_are_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.tracking.wandb.mode == "disabled":
        keys = [key for key in overridden.under("tracking.wandb") if key != "tracking.wandb.mode"]
        yield from ignored(keys, config, "tracking.wandb.mode=disabled writes nothing there")
