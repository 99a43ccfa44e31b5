"""The command `train`: from a checked configuration to a finished run.

Invariant: every line of metrics.jsonl, every checkpoint and every published policy belongs to a finished step; after a
crash the run continues from the newest checkpoint with the same bits. Deliberately not here: the order of a step
(`reinforcement.py`, `sft.py`) and the format of a checkpoint (`verl_ray/checkpoint`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from controllers.rollouts.evaluator import Evaluator
from controllers.run.recovery import Recovery, claim
from controllers.run.stopping import Stopping
from controllers.system.build import Shape, System, start
from controllers.trainers.preparation import prepare
from controllers.trainers.reinforcement import Trainer
from controllers.trainers.reward_model import PreferenceTrainer
from controllers.trainers.sft import SFTTrainer
from controllers.trainers.supervised import SupervisedTrainer
from controllers.watch.measures import Metrics
from controllers.watch.memory import MemoryRecord
from verl_ray.algorithms.objectives import PreferenceObjective
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, heed_signals, noting, raising, stop_on_signals, telling
from verl_ray.config.load import to_tree
from verl_ray.config.run import RunConfig
from verl_ray.config.schema import Config, RewardModelConfig, RLConfig, SFTConfig, SupervisedRun
from verl_ray.data.preferences import PreferenceSource
from verl_ray.data.prompts import PromptSource
from verl_ray.data.supervised import SupervisedSource
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import TrackingError
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.memory_table import memory_table, print_tables
from verl_ray.tracking import Sample, Trackers, open_trackers
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.curve import reward_curve
from verl_ray.tracking.jsonl import read_metrics
from verl_ray.tracking.report import report

SHOWN_SAMPLES = 5

MakeTrainer = Callable[[System], SupervisedTrainer[Any]]
Evaluate = Callable[[], tuple[Metrics, list[Sample]]]


def train(config: Config) -> int:
    """Run the job. Returns 0, or 1 if a run that promised a gain (prepare.min_gain) did not reach it."""
    with claim(config.run.dir):
        recovery = Recovery(config)
        print(f"{config.run.name}: writing to {config.run.dir}", flush=True)
        recovery.refuse_fewer(config.run.total_steps)
        recovery.set_aside()
        with open_session(config) as session:
            return run(config, session, recovery)


def run(config: Config, session: Session, recovery: Recovery) -> int:
    """One job on an open cluster."""
    (Path(config.run.dir) / "config.yaml").write_text(yaml.safe_dump(to_tree(config), sort_keys=False))
    print_tables(memory_table(memory_plan(config, on_gpus=Shape.of(session).gpus > 0)))
    if not isinstance(config, RLConfig):
        return train_supervised(config, session, recovery)
    prepare(config, session)
    return train_rl(config, session, recovery)


def open_session(config: Config) -> Session:
    """The cluster to run on; the run's folder, where its processes keep their logs."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with telling(lambda: Outlook("stopping as soon as Ray has started", "")):
        session = Session.open(config.ray.address)
    stop_on_signals()
    return session


def train_rl(config: RLConfig, session: Session, recovery: Recovery) -> int:
    """Reinforcement learning, from the newest checkpoint or from the beginning."""
    tokenizer = load_tokenizer(config.actor.model.path)
    prompts = PromptSource(config.data.train_path, tokenizer, config.data, config.run.seed)
    tell_skipped(prompts.skipped, "prompts of the training data are too long")
    evaluator = Evaluator(config, tokenizer) if config.run.evaluate_every else None
    stopping = Stopping(config, recovery)
    with stopping.told(), noting(), start(config, session) as system, recording(config, recovery) as trackers:
        trainer = Trainer(config, system, prompts, evaluator)
        lines = Lines(config.run, trackers, trainer.evaluate)
        done = recovery.restore(trainer)
        with recovery.kept(trainer, trackers):
            trainer.publish(done)
            lines.begin(done, recovery.unrecorded)
            recovery.commit_evaluation(trainer, trackers)
            for number in range(done + 1, config.run.total_steps + 1):
                with stopping.step(number):
                    metrics = trainer.step(number)
                    recovery.commit(number, trainer, unrecorded=metrics)
                    recovery.finish()
                lines.close(number, metrics)
                recovery.commit(number, trainer)
                if due(number, config.run.checkpoint_every, config.run.total_steps):
                    with trainer.timers("save_checkpoint"):  # on the next step's line: this one's is written first
                        recovery.save(trainer, trackers)
            recovery.finish()
    return conclude(config, trackers, lines.samples)


def train_supervised(config: SupervisedRun, session: Session, recovery: Recovery) -> int:
    """Learning from a data set alone; may end early, at sft.stop_at_accuracy."""
    make_trainer: MakeTrainer = sft_trainer(config) if isinstance(config, SFTConfig) else preference_trainer(config)
    stopping = Stopping(config, recovery)
    with stopping.told(), noting(), start(config, session) as system, recording(config, recovery) as trackers:
        trainer = make_trainer(system)
        memory = MemoryRecord(config, system.groups, on_gpus=system.has_gpus)
        lines = Lines(config.run, trackers, lambda: (trainer.evaluate(), []))
        done = recovery.restore(trainer)
        with recovery.kept(trainer, trackers):
            lines.begin(done, recovery.unrecorded)
            recovery.commit_evaluation(trainer, trackers)
            for number in range(done + 1, config.run.total_steps + 1):
                if trainer.finished:
                    break
                with stopping.step(number):
                    memory.ask()  # of the step before: answered while this one is computed
                    metrics = trainer.step() | memory.metrics()
                    recovery.commit(number, trainer, unrecorded=metrics)
                    recovery.finish()
                lines.close(number, metrics)
                recovery.commit(number, trainer)
                last = trainer.finished or number == config.run.total_steps
                if config.run.checkpoint_every and (last or number % config.run.checkpoint_every == 0):
                    with trainer.timers("save_checkpoint"):
                        recovery.save(trainer, trackers)
            recovery.finish()
            trainer.export(str(Path(config.run.dir) / "model"))
    return conclude(config, trackers, [])


def sft_trainer(config: SFTConfig) -> Callable[[System], SFTTrainer]:
    """Reads the demonstrations; returns what makes the trainer of a supervised run, once its processes are there."""
    tokenizer = load_tokenizer(config.actor.model.path)
    limits = {"max_tokens": config.sft.max_tokens, "seed": config.run.seed}
    source = SupervisedSource(config.data.train_path, tokenizer, config.data, **limits)
    tell_skipped(source.skipped, "rows of the training data are too long")
    held_out = None
    if config.run.evaluate_every and config.data.validation_path is not None:
        everything = SupervisedSource(config.data.validation_path, tokenizer, config.data, **limits)
        tell_skipped(everything.skipped, "held-out rows are too long")
        held_out = everything.all(config.evaluation.num_prompts)
    batch_size, enough = config.sft.batch_size, config.sft.stop_at_accuracy
    return lambda system: SFTTrainer(system.actor, source, held_out, batch_size, config.run.max_skipped_steps, enough)


def preference_trainer(config: RewardModelConfig, *, trains: bool = True) -> Callable[[System], PreferenceTrainer]:
    """The same for a reward model and its pairs; without training, for the held-out ones alone."""
    tokenizer = load_tokenizer(config.reward.model.path)
    wanted = config.preference

    def pairs(path: str, kind: str) -> PreferenceSource:
        source = PreferenceSource(
            path, tokenizer, config.data, max_tokens=wanted.max_tokens, seed=config.run.seed, margin=wanted.margin
        )
        for reason, count in source.skipped.items():
            tell_skipped(count, f"pairs of {kind} are {reason.replace('_', ' ')}")
        return source

    train = pairs(config.data.train_path, "the training data") if trains else None
    held_out = None
    if config.data.validation_path is not None and (config.run.evaluate_every or not trains):
        held_out = pairs(config.data.validation_path, "the held-out data").all(config.evaluation.num_pairs)
    objective = PreferenceObjective(wanted.label_smoothing)
    return lambda system: PreferenceTrainer(
        system.graders["reward"], train, held_out, wanted.batch_size, config.run.max_skipped_steps, objective
    )


def tell_skipped(count: int, what: str) -> None:
    """What data.overlong = skip, or data.unusable = skip, leaves out."""
    if count:
        print(f"warning: {count} {what} and left out", file=sys.stderr, flush=True)


class Lines:
    """The line of each step, with what its evaluation found where one is due.

    Args:
        run: says when a step is evaluated.
        trackers: where the lines go.
        evaluate: the policy, or the model, on held-out rows; and samples to read, if it makes any.
    """

    def __init__(
        self, run: RunConfig, trackers: Trackers, evaluate: Callable[[], tuple[Metrics, list[Sample]]]
    ) -> None:
        self._run, self._trackers, self._evaluate = run, trackers, evaluate
        self.samples: list[Sample] = []
        """Of the newest evaluation."""

    def begin(self, done: int, unrecorded: Metrics | None) -> None:
        """The evaluation before the first step, or the one after step `done` that a stop has left undone."""
        if done == 0 and self._run.evaluate_every:
            self.close(0, {})
        elif unrecorded is not None:
            self.close(done, unrecorded)

    def close(self, number: int, metrics: Metrics) -> None:
        """Write the line of step `number`. An evaluation is given up by a stop, and then there is no line yet."""
        if due(number, self._run.evaluate_every, self._run.total_steps):
            heed_signals()
            found, self.samples = self._evaluate()
            metrics = metrics | found
            if self.samples:
                self._trackers.samples(number, self.samples)
        self._trackers.log(number, metrics)


@contextlib.contextmanager
def recording(config: Config, recovery: Recovery) -> Iterator[Trackers]:
    """The trackers of the run, closed as failed if anything raises."""
    trackers = Trackers([])
    try:
        with raising():  # W&B may wait for its server
            trackers = open_trackers(
                config.tracking,
                config.run,
                to_tree(config),
                committed_step=recovery.recorded_step,
                state=recovery.tracker_state,
            )
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


def due(number: int, every: int, total: int) -> bool:
    """Every `every` steps and after the last one; never for 0."""
    return every > 0 and (number % every == 0 or number == total)


def conclude(config: Config, trackers: Trackers, samples: list[Sample]) -> int:
    """The table of before and after, where everything is, what to try next; and whether the promised gain is there."""
    folder = Path(config.run.dir)
    lines = read_metrics(folder / "metrics.jsonl")
    evaluated = [{k: v for k, v in line.items() if k.startswith("val-")} for line in lines]
    evaluated = [line for line in evaluated if line]
    before, after = (evaluated[0], evaluated[-1]) if evaluated else ({}, {})
    outputs = {"run": str(folder), **trackers.outputs()}
    if isinstance(config, RLConfig):
        outputs["reward curve"] = str(folder / "reward_curve.png")
        try:
            reward_curve(folder / "metrics.jsonl", folder / "reward_curve.png")
        except TrackingError as error:  # no score came through: the metrics say so, and the run is done all the same
            print(f"warning: {error}", file=sys.stderr, flush=True)
    report(before, after, samples[:SHOWN_SAMPLES], outputs, next_command(config))
    if not isinstance(config, RLConfig) or config.prepare is None or not evaluated:
        return 0
    gains = [after[name] - before[name] for name in after if name.startswith(HELD_OUT)]
    if min(gains) >= config.prepare.min_gain:
        return 0
    print(
        f"held-out accuracy rose by {min(gains):.3f}, less than prepare.min_gain = {config.prepare.min_gain}: "
        "the run did not learn what it should have",
        file=sys.stderr,
    )
    return 1


def next_command(config: Config) -> str:
    """Something to try now."""
    if isinstance(config, RLConfig) and config.prepare is not None:
        return "scripts/quickstart algorithm=grpo backend=fsdp"
    model = Path(config.run.dir) / "model"
    if isinstance(config, SFTConfig):
        return f"verl-ray check --config-name ppo model.path={model}"
    if isinstance(config, RewardModelConfig):
        return f"verl-ray check --config-name ppo reward=model reward.model.path={model}"
    return "verl-ray evaluate --help"
