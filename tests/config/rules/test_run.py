"""The name of a run, resuming, evaluating, checkpoints and tracking."""

from __future__ import annotations

from controllers.compose.composition import examine
from tests.config.rules.cases import Case

CASES = [
    Case(
        "run_has_a_name",
        "run.name=a/b run.dir=x",
        "run.name",
        "also the name of its folder",
        "run.dir takes a path",
    ),
    Case(
        "run_has_a_name",
        "run.name=.. run.dir=x",
        "run.name",
        "also the name of its folder",
        "dots, - and _",
    ),
    Case(
        "run_has_a_name",
        "'run.name=a b' run.dir=x",
        "run.name",
        "also the name of its folder",
        "letters, digits",
    ),
    Case(
        "run_has_a_name", "\"run.dir=' '\"", "run.dir", "needs a folder", "outputs/NAME"
    ),
    Case(
        "run_has_one_length",
        "run.total_epochs=2 run.total_steps=200",
        "run.total_epochs",
        "run.total_steps=200 sets the length",
        "run.total_steps=null",
    ),
    Case(
        "run_has_one_length",
        "run.total_steps=null",
        "run.total_steps",
        "in steps or in epochs",
        "run.total_epochs=1",
    ),
    Case(
        "resume_is_a_choice_or_a_path",
        "run.resume=Auto",
        "run.resume",
        "no such choice",
        "auto, none, or the path",
    ),
    Case(
        "evaluation_has_data",
        "model.path=/m data.train_path=t data.validation_path=null",
        "data.validation_path",
        "run.evaluate_every=10 needs held-out problems",
        "run.evaluate_every=0",
        "ppo",
    ),
    Case(
        "evaluation_is_used",
        "prepare.min_gain=0 run.evaluate_every=0 evaluation.samples=3",
        "evaluation.samples",
        "run.evaluate_every=0 turns evaluation off",
        "Leave it out",
    ),
    Case(
        "stopping_is_measured",
        "model.path=/m data.train_path=t data.validation_path=v sft.stop_at_accuracy=0.5 run.evaluate_every=0",
        "sft.stop_at_accuracy",
        "run.evaluate_every=0 turns that off",
        "Use null",
        "sft",
    ),
    Case(
        "best_is_measured",
        "run.evaluate_every=0 prepare.min_gain=0 run.early_stop=3",
        "run.early_stop",
        "run.evaluate_every=0 turns evaluation off",
        "run.evaluate_every=10",
    ),
    Case(
        "best_is_measured",
        "run.best_metric=acc/mean@1",
        "run.best_metric",
        "begin with val-",
        "val-core/*/acc/mean@1, or null",
    ),
    Case(
        "best_is_measured",
        "run.best_is=lowest",
        "run.best_is",
        "which has its direction",
        "run.best_metric=val-core/held_out/...",
    ),
    Case(
        "checkpoints_are_kept",
        "run.checkpoint_every=0 run.keep_checkpoints=9",
        "run.keep_checkpoints",
        "writes no checkpoints on the way",
        "Leave it out",
    ),
    Case(
        "wandb_settings_are_used",
        "tracking.wandb.mode=disabled tracking.wandb.project=mine",
        "tracking.wandb.project",
        "mode=disabled writes nothing",
        "Leave it out",
    ),
    Case(
        "rollout_bound_is_used",
        "tracking.rollouts=none tracking.rollouts_max_mb=9",
        "tracking.rollouts_max_mb",
        "rollouts=none writes no rollouts",
        "Leave it out",
    ),
    Case(
        "greedy_evaluation_needs_one_response",
        "evaluation.group_size=4",
        "evaluation.group_size",
        "all responses to a problem are the same",
        "Use 1",
    ),
    Case(
        "held_out_deadline_is_used",
        "evaluation.deadline_s=3.0",
        "evaluation.deadline_s",
        "evaluation.functions=null leaves grading to the reward",
        "Leave it out",
    ),
    Case(
        "greedy_evaluation_truncates_nothing",
        "evaluation.top_p=0.9",
        "evaluation.top_p",
        "the likeliest token is taken",
        "a temperature above 0",
    ),
    Case(
        "greedy_evaluation_truncates_nothing",
        "evaluation.top_k=20",
        "evaluation.top_k",
        "the likeliest token is taken",
        "Use -1",
    ),
]


def test_an_evaluation_looks_at_its_settings_whenever_training_would() -> None:
    settings = [
        "run.evaluate_every=0",
        "evaluation.temperature=1.0",
        "evaluation.group_size=2",
    ]
    assert {problem.key for problem in examine("quickstart", settings).problems} == {
        "evaluation.temperature", "evaluation.group_size", "prepare.min_gain",
    }  # fmt: skip
    assert examine("quickstart", settings, evaluates=True).problems == []
    without = [
        "model.path=/m",
        "data.train_path=t",
        "data.validation_path=null",
        "run.evaluate_every=0",
    ]
    (problem,) = examine("ppo", without, evaluates=True).problems
    assert (problem.key, problem.rule) == (
        "data.validation_path",
        "an evaluation needs held-out problems",
    )
