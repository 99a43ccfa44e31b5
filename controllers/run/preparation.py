"""What a run makes itself before it trains: arithmetic problems, a tokenizer, and a model that has seen some of them.

Invariant: inputs that are complete are never made again, so a resumed run finds what it began with: a marker written
last says so. One written first says that the folder is a run's own: no other is ever deleted. Deliberately not here:
reinforcement learning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from controllers.run.keeping import GivenUpAnywhere, NothingKept
from controllers.run.loop import Loop
from controllers.system.build import Shape, resolve_on, start
from controllers.trainers.base import Evaluation
from controllers.trainers.sft import ACCURACY, SFTTrainer
from controllers.watch.measures import Metrics
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, noting, telling
from verl_ray.config.data import DataFilesConfig
from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.preparation import PrepareConfig, WarmStartConfig
from verl_ray.config.resolve import shared_anew
from verl_ray.config.roles import ModelConfig, SupervisedRole
from verl_ray.config.run import RunConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.sft import SFTConfig, SupervisedConfig, SupervisedEvaluationConfig
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.stages import TrainingBatch
from verl_ray.data.supervised import SupervisedSource
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.preflight.findings import INPUTS_COMPLETE, INPUTS_STARTED, foreign_inputs, inputs_folder
from verl_ray.tracking.base import Sample, Tracker
from workers.actor import ActorWorker


def prepare(run: Config, session: Session) -> None:
    """Make run.dir/inputs, if the run makes any and they are not complete: data files, and a model warm-started to a
    middling accuracy.

    Raises DataError if the accuracy never falls within prepare.warm_start's bounds, ConfigError if the folder is there
    and is not a run's.
    """
    config, wanted = run.drawing, run.preparation
    if config is None or wanted is None:
        return
    folder = inputs_folder(config)
    complete, recipe = folder / INPUTS_COMPLETE, _recipe(config, wanted)
    if complete.exists():
        if complete.read_text() != recipe:
            rule = f"{folder} was made with another seed or other settings of prepare"
            fix = "set them back, or use another run.dir"
            raise ConfigError([Problem("prepare", "changed", rule, fix)])
        return
    if problems := list(foreign_inputs(config)):
        raise ConfigError(problems)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / INPUTS_STARTED).touch()
    files = write_arithmetic(
        folder,
        max_operand=wanted.max_operand,
        num_train=wanted.num_train,
        num_validation=wanted.num_validation,
        seed=config.run.seed,
        wrong_fraction=wanted.warm_start.wrong_fraction,
    )
    character_tokenizer(folder / "tokenizer", ALPHABET)
    make_tiny_qwen3(folder / "untrained", folder / "tokenizer", wanted.model, config.run.seed)
    _warm_start(config, wanted, session, folder, files.train.jsonl, files.validation.jsonl)
    complete.write_text(recipe)


def _recipe(config: DrawingConfig, wanted: PrepareConfig) -> str:
    """What the inputs depend on."""
    return json.dumps({"seed": config.run.seed, **wanted.model_dump(exclude={"min_gain"})}, indent=1)


class WarmStart(SFTTrainer):
    """Is finished once its accuracy lies within the bounds of prepare.warm_start."""

    def __init__(
        self,
        config: WarmStartConfig,
        actor: WorkerGroup[ActorWorker],
        train: SupervisedSource,
        held_out: TrainingBatch,
        max_skipped_steps: int,
    ) -> None:
        super().__init__(actor, train, held_out, config.batch_size, max_skipped_steps)
        self._config = config
        self._steps = 0
        self.reached = 0.0
        """The accuracy of the last evaluation."""

    def step(self, number: int) -> Metrics:
        self._steps = number
        return super().step(number)

    def evaluate(self) -> Evaluation:
        config = self._config
        metrics, samples = super().evaluate()
        self.reached = metrics[ACCURACY]
        within = config.accuracy_low <= self.reached <= config.accuracy_high
        self.finished = within and self._steps >= max(1, config.min_steps)  # a model that has seen nothing is not warm
        return metrics, samples


class WarmStartLines(Tracker):
    """The steps that were evaluated, a line each, for whoever waits."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if {"train/loss", ACCURACY} <= metrics.keys():
            told = f"loss {metrics['train/loss']:.3f}  held-out {metrics[ACCURACY]:.3f}"
            print(f"warm start: step {step}  {told}", flush=True)

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}


def _warm_start(
    config: DrawingConfig, wanted: PrepareConfig, session: Session, folder: Path, train: Path, validation: Path
) -> None:
    """The model in `folder`/model. Nothing of it is kept at a stop: it begins anew next time."""
    warm = wanted.warm_start
    job = supervised_job(config, wanted, folder, train, validation)
    job = resolve_on(shared_anew(job), Shape.of(session))
    tokenizer = load_tokenizer(folder / "tokenizer")
    limits = {"max_tokens": job.sft.max_tokens, "seed": config.run.seed}
    outlook = Outlook("stopping; the warm start begins anew next time, there is nothing to save yet", "")
    with telling(lambda: outlook), noting(), start(job, session) as system:
        held_out = SupervisedSource(str(validation), tokenizer, job.data, **limits).all()
        source = SupervisedSource(str(train), tokenizer, job.data, **limits)
        trainer = WarmStart(warm, system.actor, source, held_out, config.run.max_skipped_steps)
        Loop(job.run, trainer, WarmStartLines(), NothingKept(), GivenUpAnywhere()).run()
        if not trainer.finished:
            raise DataError(
                f"the warm start ended at a held-out accuracy of {trainer.reached:.3f}, not within prepare.warm_start."
                f"accuracy_low = {warm.accuracy_low} and accuracy_high = {warm.accuracy_high}; raise max_steps, or "
                "lower evaluate_every if the accuracy jumped over them"
            )
        trainer.export(str(folder / "model"))


def supervised_job(
    config: DrawingConfig, wanted: PrepareConfig, folder: Path, train: Path, validation: Path
) -> SFTConfig:
    """The warm start as a supervised job: the actor's backend and ranks, the warm start's optimizer."""
    warm = wanted.warm_start
    model = ModelConfig(path=str(folder / "untrained"))
    steps = {"total_steps": warm.max_steps, "evaluate_every": warm.evaluate_every, "checkpoint_every": 0}
    run = config.run.model_dump() | steps
    return SFTConfig(
        task="sft",
        run=RunConfig(**run),
        ray=config.ray,
        model=model,
        data=DataFilesConfig(
            train_path=str(train),
            validation_path=str(validation),
            overlong=config.data.overlong,
            shuffle=config.data.shuffle,
            apply_chat_template=config.data.apply_chat_template,
        ),
        actor=SupervisedRole(
            model=model,
            num_ranks=config.actor.num_ranks,
            backend=config.actor.backend,
            optimizer=warm.optimizer,
            lora=config.actor.lora.model_copy(update={"rank": 0}),  # the model is new: all of it has to learn
            expert_balance=config.actor.expert_balance,
        ),
        sft=SupervisedConfig(
            batch_size=warm.batch_size,
            max_tokens=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            stop_at_accuracy=None,
        ),
        evaluation=SupervisedEvaluationConfig(num_prompts=None),
        tracking=config.tracking,
    )
