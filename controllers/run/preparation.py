"""The inputs that a run makes for itself before it trains.

They are arithmetic problems, a tokenizer, and a model that was warm-started on some of
the problems.

Invariant: complete inputs are never made again, so a resumed run finds the inputs that
it began with. A marker that is written last shows that they are complete. Another one
that is written first shows that a run made the folder, and no other folder is ever
deleted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from controllers.run.loop import Loop, NoPersistence, UnguardedSteps
from controllers.system.build import start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.sft import ACCURACY, SFTTrainer
from controllers.trainers.supervised import Examples
from controllers.watch.held_out_measures import Evaluation
from controllers.watch.measures import Metrics
from verl_ray.agents import calculations
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, announcing, deferring_signals
from verl_ray.config.data import DataFilesConfig
from verl_ray.config.load import with_auto_again
from verl_ray.config.preparation import PrepareConfig, WarmStartConfig
from verl_ray.config.roles import ModelConfig, SupervisedRole
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.run import RolloutTrackingConfig, RunConfig, TrackingConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.sft import (
    LIKELIHOOD,
    SFTConfig,
    SupervisedConfig,
    SupervisedEvaluationConfig,
)
from verl_ray.data.arithmetic import (
    ALPHABET,
    WORD_VOCABULARY,
    ArithmeticFiles,
    sample_texts,
    write_arithmetic,
    write_word_problems,
)
from verl_ray.data.conversations import SupervisedSource
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer, train_bpe
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.preflight.findings import (
    INPUTS_COMPLETE,
    INPUTS_STARTED,
    foreign_inputs,
    inputs_folder,
)
from verl_ray.profiling.phases import OpenPhase, phase
from verl_ray.tracking.base import Sample, Tracker
from verl_ray.tracking.block import duration_text
from workers.actor import ActorWorker


def prepare(config: Config, session: Session) -> None:
    """Make run.dir/inputs, if the run makes its inputs and they are not complete.

    Raises:
        DataError: The accuracy of the warm-started model never came within the bounds
            of prepare.warm_start.
        ConfigError: The folder exists and no run made it, or it was made with other
            settings.
    """
    preparation = config.preparation
    if not isinstance(config, RolloutTaskConfig) or preparation is None:
        return

    folder = inputs_folder(config)
    completed = folder / INPUTS_COMPLETE
    recipe = _recipe(config, preparation)
    if completed.exists():
        recipes = [recipe, *_earlier_recipes(config, preparation)]
        if completed.read_text() not in recipes:
            rule = f"{folder} was made with another seed or other settings of prepare"
            fix = "set them back, or use another run.dir"
            raise ConfigError([Problem("prepare", "changed", rule, fix)])
        return

    problems = list(foreign_inputs(config))
    if problems:
        raise ConfigError(problems)

    # Inputs that were not completed are made again from the beginning.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / INPUTS_STARTED).touch()

    seed = config.run.seed
    files = write_problems(folder, preparation, seed)
    tokenizer = folder / "tokenizer"
    make_tiny_qwen3(folder / "untrained", tokenizer, preparation.model, seed)

    train = files.train.jsonl
    validation = files.validation.jsonl
    _warm_start(config, preparation, session, folder, train, validation)

    # The marker comes last: whatever is missing before it is made again.
    completed.write_text(recipe)


def write_problems(
    folder: Path, preparation: PrepareConfig, seed: int
) -> ArithmeticFiles:
    """Write the problems, and a tokenizer for them, to `folder`."""
    sizes = {
        "max_operand": preparation.max_operand,
        "num_train": preparation.num_train,
        "num_validation": preparation.num_validation,
        "seed": seed,
    }
    wrong_fraction = preparation.warm_start.wrong_fraction
    tokenizer = folder / "tokenizer"

    if preparation.problems == "word_problems":
        # Plain texts have no turns to delimit.
        train_bpe(tokenizer, sample_texts(), WORD_VOCABULARY, None, single_digits=True)
        return write_word_problems(
            folder,
            **sizes,
            wordings=preparation.wordings,
            wrong_fraction=wrong_fraction,
        )
    if preparation.problems == "calculator":
        train_bpe(
            tokenizer,
            calculations.sample_texts(),
            calculations.VOCABULARY,
            calculations.TEMPLATE,
            single_digits=True,
        )
        return calculations.write_calculations(
            folder, **sizes, wrong_fraction=wrong_fraction
        )
    character_tokenizer(tokenizer, ALPHABET)
    return write_arithmetic(folder, **sizes, wrong_fraction=wrong_fraction)


def _recipe(
    config: RolloutTaskConfig, preparation: PrepareConfig, *unknown: str
) -> str:
    """Return the settings that the inputs depend on, as JSON.

    Args:
        unknown: Settings to leave out.
    """
    settings = preparation.model_dump(exclude={"min_gain", *unknown})
    return json.dumps({"seed": config.run.seed, **settings}, indent=1)


def _earlier_recipes(
    config: RolloutTaskConfig, preparation: PrepareConfig
) -> Iterator[str]:
    """Yield what an earlier version wrote for the same inputs."""
    # Without prepare.problems all problems were sums.
    if preparation.problems == "sums":
        yield _recipe(config, preparation, "problems")


class WarmStart(SFTTrainer):
    """Supervised trainer that stops at a middling accuracy.

    It is finished once its accuracy is within the bounds of prepare.warm_start.
    """

    def __init__(
        self,
        config: WarmStartConfig,
        actor: WorkerGroup[ActorWorker],
        examples: Examples,
        max_skipped_steps: int,
    ) -> None:
        super().__init__(actor, examples, config.batch_size, max_skipped_steps)
        self._config = config
        self._steps = 0

        self.reached = 0.0
        """Accuracy of the last evaluation."""

    def step(self, number: int) -> Metrics:
        self._steps = number
        return super().step(number)

    def evaluate(self) -> Evaluation:
        config = self._config
        evaluation = super().evaluate()

        self.reached = evaluation.metrics[ACCURACY]
        is_within = config.accuracy_low <= self.reached <= config.accuracy_high
        # A model that has not trained at all is not warm, whatever its accuracy.
        fewest_steps = max(1, config.min_steps)
        self.finished = is_within and self._steps >= fewest_steps
        return evaluation

    @property
    def outcome(self) -> str:
        """The end of a warm start that reached its accuracy, in words."""
        bounds = f"{self._config.accuracy_low:g} to {self._config.accuracy_high:g}"
        return (
            f"done after {self._steps} steps, the held-out accuracy {self.reached:.3f}"
            f" is within {bounds}"
        )


class WarmStartProgress(Tracker):
    """Prints a line for every evaluated step to the user who waits, and counts all."""

    def __init__(
        self,
        warm_start: OpenPhase,
        config: WarmStartConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count the steps in a phase.

        Args:
            warm_start: The phase.
            config: Its settings, which say how many steps there are.
            clock: Clock in seconds.
        """
        self._phase = warm_start
        self._config = config
        self._clock = clock
        self._first: tuple[int, float] | None = None
        """The first step whose line was written, and when."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._phase.reach(step, self._config.max_steps, "steps at most")
        if step > 0 and self._first is None:
            # The first step takes longer than those after it.
            self._first = step, self._clock()
        if {"train/loss", ACCURACY} <= metrics.keys():
            loss = metrics["train/loss"]
            accuracy = metrics[ACCURACY]
            print(
                f"warm start: step {step}  loss {loss:.3f}  held-out {accuracy:.3f}"
                f"{self._remaining(step)}",
                flush=True,
            )

    def _remaining(self, step: int) -> str:
        """Return how long the rest takes at least and at most, as text."""
        first_step, begun_s = self._first or (step, 0.0)
        if step == first_step or step >= self._config.max_steps:
            return ""
        step_s = (self._clock() - begun_s) / (step - first_step)
        most = duration_text((self._config.max_steps - step) * step_s)
        if step >= self._config.min_steps:
            return f"  at most {most} left"
        least = duration_text((self._config.min_steps - step) * step_s)
        return f"  {least} to {most} left"

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}


def _warm_start(
    config: RolloutTaskConfig,
    preparation: PrepareConfig,
    session: Session,
    folder: Path,
    train: Path,
    validation: Path,
) -> None:
    """Train the model and write it to `folder`/model.

    A stop saves nothing: the next run begins the warm start again.
    """
    warm = preparation.warm_start
    job = supervised_job(config, preparation, folder, train, validation)
    # The warm start has the devices to itself, so what was auto is resolved for it.
    job = resolve_on(with_auto_again(job), ClusterShape.of(session))

    tokenizer = load_tokenizer(folder / "tokenizer")
    outlook = Outlook(
        "stopping; the warm start begins anew next time, there is nothing to save yet",
        "",
    )

    with (
        phase("warm start") as warm_start,
        announcing(lambda: outlook),
        deferring_signals(),
        start(job, session) as system,
    ):
        source, held_out_source = (
            SupervisedSource(
                path,
                tokenizer,
                job.data,
                max_tokens=job.sft.max_tokens,
                seed=config.run.seed,
            )
            for path in (train, validation)
        )
        examples = Examples(source, held_out_source.all())

        max_skipped_steps = config.run.max_skipped_steps
        trainer = WarmStart(warm, system.actor, examples, max_skipped_steps)
        counter = WarmStartProgress(warm_start, warm)
        loop = Loop(job.run, trainer, counter, NoPersistence(), UnguardedSteps())
        loop.run()

        if not trainer.finished:
            raise DataError(
                "the warm start ended at a held-out accuracy of"
                f" {trainer.reached:.3f}, not within prepare.warm_start.accuracy_low ="
                f" {warm.accuracy_low} and accuracy_high = {warm.accuracy_high}",
                fix="raise max_steps, or lower evaluate_every if the accuracy jumped"
                " over them",
            )
        print(f"warm start: {trainer.outcome}", flush=True)
        trainer.export(str(folder / "model"))


def supervised_job(
    config: RolloutTaskConfig,
    preparation: PrepareConfig,
    folder: Path,
    train: Path,
    validation: Path,
) -> SFTConfig:
    """Return the warm start as a supervised job.

    It has the actor's backend and ranks, and the optimizer of prepare.warm_start.
    """
    warm = preparation.warm_start
    model = ModelConfig(
        path=str(folder / "untrained"), revision=None, trust_remote_code=False
    )

    data = DataFilesConfig(
        train_path=str(train),
        validation_path=str(validation),
        columns=None,
        stream_above_gib=config.data.stream_above_gib,
        overlong=config.data.overlong,
        shuffle=config.data.shuffle,
        apply_chat_template=config.data.apply_chat_template,
        chat_template=config.data.chat_template,
        chat_template_kwargs=config.data.chat_template_kwargs,
        template_day=config.data.template_day,
        special_tokens=config.data.special_tokens,
    )

    actor = SupervisedRole(
        model=model,
        num_ranks=config.actor.num_ranks,
        backend=config.actor.backend,
        optimizer=warm.optimizer,
        # The model is new, so all of its weights have to learn.
        lora=config.actor.lora.model_copy(update={"rank": 0}),
        expert_balance=config.actor.expert_balance,
        expert_bias_update=config.actor.expert_bias_update,
    )

    max_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    supervised = {
        "batch_size": warm.batch_size,
        "max_tokens": max_tokens,
        "stop_at_accuracy": None,
        **LIKELIHOOD,
    }

    return SFTConfig(
        task="sft",
        run=_run_settings(config.run, warm),
        ray=config.ray,
        model=model,
        data=data,
        actor=actor,
        sft=SupervisedConfig.model_validate(supervised),
        evaluation=SupervisedEvaluationConfig(num_prompts=None),
        tracking=_unrecorded(config.tracking),
    )


def _unrecorded(tracking: TrackingConfig) -> RolloutTrackingConfig:
    """Return the settings of the record that a warm start does not write."""
    unrecorded = {"rollouts": "none", "rollouts_max_mb": 1}
    return RolloutTrackingConfig.model_validate(tracking.model_dump() | unrecorded)


def _run_settings(run: RunConfig, warm: WarmStartConfig) -> RunConfig:
    """Return the settings of the warm start as a run, which has a length of its own."""
    settings = {
        "total_steps": warm.max_steps,
        "total_epochs": None,
        "evaluate_every": warm.evaluate_every,
        "checkpoint_every": 0,
        "save_at_end": False,
        # It stops by its accuracy alone.
        "best_metric": None,
        "best_is": None,
        "early_stop": None,
    }
    return run.model_copy(update=settings)
