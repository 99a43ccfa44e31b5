"""Rules of a run as a whole: its name, resuming, evaluating, checkpoints, tracking.

Invariant: a setting of something that the run does not do is refused. Deliberately not
here: files that must exist (`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys, ignored_settings
from verl_ray.config.schema import Config
from verl_ray.errors import Problem

if TYPE_CHECKING:  # they import this module
    from verl_ray.config.tasks.rl import RLConfig
    from verl_ray.config.tasks.sft import SFTConfig


def run_has_a_name(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem unless the run has a name and a folder."""
    name = config.run.name

    # A name of dots alone would be a folder that exists already.
    is_folder_name = re.fullmatch(r"[A-Za-z0-9._-]+", name) is not None
    if not is_folder_name or name in (".", ".."):
        rule = "the name of a run is also the name of its folder"
        fix = "Use letters, digits, dots, - and _ ; run.dir takes a path."
        yield Problem("run.name", name, rule, fix)

    folder = config.run.dir
    if not folder.strip():
        rule = "the run needs a folder to write to"
        yield Problem("run.dir", folder, rule, "Use outputs/NAME.")


def run_has_one_length(config: Config, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem unless the length is given in steps or in epochs, not both."""
    steps = config.run.total_steps
    epochs = config.run.total_epochs

    if steps is not None and epochs is not None:
        rule = f"run.total_steps={steps} sets the length of the run as well"
        fix = (
            "Add run.total_steps=null to train for epochs, or use"
            " run.total_epochs=null."
        )
        yield Problem("run.total_epochs", epochs, rule, fix)

    if steps is None and epochs is None:
        rule = "the run needs a length, in steps or in epochs"
        fix = "Use a number of steps, or add run.total_epochs=1."
        yield Problem("run.total_steps", None, rule, fix)


def resume_is_a_choice_or_a_path(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if run.resume is empty, or a word that is meant as a choice."""
    resume = config.run.resume

    # Any other text may be a path, so only these words are refused.
    misspellings = ("auto", "none", "true", "false")
    is_choice = resume in ("auto", "none")
    is_misspelt = not is_choice and resume.lower() in misspellings

    if is_misspelt or resume.strip() == "":
        fix = "Use auto, none, or the path of a checkpoint."
        yield Problem("run.resume", resume, "no such choice", fix)


# -------------------------------------------------------------------------- evaluations


def evaluation_has_data(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the run evaluates and has no held-out problems."""
    key = "data.validation_path"
    evaluate_every = config.run.evaluate_every
    if config.data.validation_path is not None:
        return

    # The command `evaluate` needs data even if the run itself never evaluates.
    if overridden.evaluates:
        rule = "an evaluation needs held-out problems"
        yield Problem(key, None, rule, f"Set {key} to a file.")
    elif evaluate_every:
        rule = f"run.evaluate_every={evaluate_every} needs held-out problems"
        fix = f"Set {key} to a file, or run.evaluate_every=0."
        yield Problem(key, None, rule, fix)


def evaluation_is_used(config: Config, overridden: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of evaluations that never happen."""
    if config.run.evaluate_every == 0 and not overridden.evaluates:
        keys = overridden.under("evaluation")
        reason = "run.evaluate_every=0 turns evaluation off"
        yield from ignored_settings(keys, config, reason)


def held_out_deadline_is_used(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the deadline of a grader is set that does not exist."""
    if config.evaluation.functions is None:
        keys = overridden.under("evaluation.deadline_s")
        reason = (
            "evaluation.functions=null leaves grading to the reward, with its deadline"
        )
        yield from ignored_settings(keys, config, reason)


def greedy_evaluation_needs_one_response(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if greedy decoding would generate a response several times."""
    evaluation = config.evaluation
    if evaluation.temperature == 0 and evaluation.group_size > 1:
        rule = "with evaluation.temperature=0 all responses to a problem are the same"
        fix = "Use 1, or a temperature above 0."
        yield Problem("evaluation.group_size", evaluation.group_size, rule, fix)


def greedy_evaluation_truncates_nothing(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each truncation of a distribution that is not sampled."""
    evaluation = config.evaluation
    if evaluation.temperature:
        return
    rule = "with evaluation.temperature=0 the likeliest token is taken"
    for key, value, all_tokens in (
        ("evaluation.top_p", evaluation.top_p, (1.0,)),
        ("evaluation.top_k", evaluation.top_k, (-1, 0)),
    ):
        if value not in all_tokens:
            fix = f"Use {all_tokens[0]}, or a temperature above 0."
            yield Problem(key, value, rule, fix)


def stopping_is_measured(config: SFTConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if a run stops at an accuracy that it does not measure."""
    accuracy = config.sft.stop_at_accuracy
    if accuracy is not None and config.run.evaluate_every == 0:
        rule = (
            "the accuracy is measured by evaluating, and run.evaluate_every=0 turns"
            " that off"
        )
        fix = "Use null, or run.evaluate_every=10."
        yield Problem("sft.stop_at_accuracy", accuracy, rule, fix)


def best_is_measured(config: Config, overridden: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of a best step that is never looked for."""
    run = config.run
    if run.best_metric is not None and not run.best_metric.startswith("val-"):
        rule = "names of metrics on held-out rows begin with val-"
        fix = "Use one of metrics.jsonl, such as val-core/*/acc/mean@1, or null."
        yield Problem("run.best_metric", run.best_metric, rule, fix)

    if run.best_metric is None and run.best_is is not None:
        rule = "run.best_metric=null is the task's own metric, which has its direction"
        fix = "Leave it out, or name a metric: run.best_metric=val-core/held_out/..."
        yield Problem("run.best_is", run.best_is, rule, fix)

    if run.evaluate_every == 0:
        reason = "run.evaluate_every=0 turns evaluation off"
        fix = "Leave it out, or use run.evaluate_every=10."
        for key in ("run.best_metric", "run.best_is", "run.early_stop"):
            yield from ignored_settings(overridden.under(key), config, reason, fix)


# --------------------------------------------------------------------- what is recorded


def checkpoints_are_kept(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of checkpoints that are not written."""
    if config.run.checkpoint_every == 0:
        reason = "run.checkpoint_every=0 writes no checkpoints"
        for key in ("run.keep_checkpoints", "run.checkpoint_behind"):
            yield from ignored_settings(overridden.under(key), config, reason)


def wandb_settings_are_used(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of W&B while it is disabled."""
    switch = "tracking.wandb.mode"
    if config.tracking.wandb.mode != "disabled":
        return

    # The mode is what switches it off.
    keys = [key for key in overridden.under("tracking.wandb") if key != switch]
    reason = f"{switch}=disabled writes nothing there"
    yield from ignored_settings(keys, config, reason)
