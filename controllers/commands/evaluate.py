"""The command `evaluate`: one evaluation on held-out data, without training.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is written. Deliberately not here:
how a policy or a reward model is measured (`evaluator.py`, `reward_model.py`).
"""

from __future__ import annotations

from controllers.rollouts.evaluator import Evaluator
from controllers.run.recovery import Recovery
from controllers.run.training import open_session, preference_trainer
from controllers.system.build import start
from controllers.trainers.reinforcement import Trainer
from controllers.watch.measures import Metrics
from verl_ray.config.schema import Config, RewardModelConfig, RLConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import ConfigError, Problem
from verl_ray.models.families import VALUE_HEAD
from verl_ray.preflight.model_directories import tensor_shapes
from verl_ray.tracking.base import Sample


def evaluate(config: Config) -> int:
    """The command `evaluate`: one evaluation of model.path, or of the checkpoint that run.resume names; of a policy on
    held-out problems, or of a reward model on held-out pairs."""
    samples: list[Sample] = []
    if isinstance(config, RewardModelConfig):
        metrics = evaluate_reward_model(config)
    else:
        assert isinstance(config, RLConfig), "the check of the command refuses a supervised run"
        metrics, samples = evaluate_policy(config)
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}")
    for sample in samples:
        print(f"{sample.prompt!r} -> {sample.response!r} (answer {sample.answer!r}, score {sample.score:g})")
    return 0


def evaluate_policy(config: RLConfig) -> tuple[Metrics, list[Sample]]:
    """Accuracy of model.path, or of the checkpoint that run.resume names, on the held-out problems."""
    recovery = Recovery(config)
    with open_session(config) as session:
        tokenizer = load_tokenizer(config.actor.model.path)
        prompts = PromptSource(config.data.train_path, tokenizer, config.data, config.run.seed)
        with start(config, session, learns=False) as system:
            trainer = Trainer(config, system, prompts, Evaluator(config, tokenizer))
            trainer.publish(recovery.restore(trainer))
            return trainer.evaluate()


def evaluate_reward_model(config: RewardModelConfig) -> Metrics:
    """A reward model (model.path, or the checkpoint that run.resume names) on the held-out pairs."""
    recovery, path = Recovery(config), config.reward.model.path
    if recovery.step is None and VALUE_HEAD not in tensor_shapes(path):
        rule = f"there is nothing to evaluate: this model has no {VALUE_HEAD}, and run.resume leads to no checkpoint"
        fix = "Give the directory of a reward model, or run.resume=CHECKPOINT."
        raise ConfigError([Problem("reward.model.path", path, rule, fix)])
    make_trainer = preference_trainer(config, trains=False)
    with open_session(config) as session, start(config, session) as system:
        trainer = make_trainer(system)
        recovery.restore(trainer)
        return trainer.evaluate()
