"""What a run makes itself before it trains: arithmetic problems, a tokenizer, and a model that has seen some of them.

Invariant: inputs that are complete are never made again, so a resumed run finds what it began with: a marker written
last says so. One written first says that the folder is a run's own: no other is ever deleted. Deliberately not here:
reinforcement learning.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from controllers.system.build import Shape, resolve_on, start
from controllers.trainers.sft import SFTTrainer
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, heed_signals, noting, telling
from verl_ray.config.data import DataFilesConfig
from verl_ray.config.preparation import PrepareConfig
from verl_ray.config.resolve import shared_anew
from verl_ray.config.roles import ModelConfig, SupervisedRole
from verl_ray.config.run import RunConfig
from verl_ray.config.schema import RLConfig, SFTConfig, SupervisedConfig, SupervisedEvaluationConfig
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.supervised import SupervisedSource
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.preflight.findings import INPUTS_COMPLETE, INPUTS_STARTED, foreign_inputs, inputs_folder


def prepare(config: RLConfig, session: Session) -> None:
    """Make run.dir/inputs, unless it is complete: data files, and a model warm-started to a middling accuracy.

    Raises DataError if the accuracy never falls within prepare.warm_start's bounds, ConfigError if the folder is there
    and is not a run's.
    """
    wanted, folder = config.prepare, inputs_folder(config)
    if wanted is None:
        return
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


def _recipe(config: RLConfig, wanted: PrepareConfig) -> str:
    """What the inputs depend on."""
    return json.dumps({"seed": config.run.seed, **wanted.model_dump(exclude={"min_gain"})}, indent=1)


def _warm_start(
    config: RLConfig, wanted: PrepareConfig, session: Session, folder: Path, train: Path, validation: Path
) -> None:
    warm = wanted.warm_start
    job = supervised_job(config, wanted, folder, train, validation)
    job = resolve_on(shared_anew(job), Shape.of(session))
    tokenizer = load_tokenizer(folder / "tokenizer")
    limits = {"max_tokens": job.sft.max_tokens, "seed": config.run.seed}
    outlook = Outlook("stopping; the warm start begins anew next time, there is nothing to save yet", "")
    with telling(lambda: outlook), noting(), start(job, session) as system:
        held_out = SupervisedSource(str(validation), tokenizer, job.data, **limits).all()
        source = SupervisedSource(str(train), tokenizer, job.data, **limits)
        trainer = SFTTrainer(system.actor, source, held_out, warm.batch_size, config.run.max_skipped_steps)
        accuracy, ready = 0.0, False
        for number in range(1, warm.max_steps + 1):
            heed_signals()
            metrics = trainer.step(number)
            if number % warm.evaluate_every == 0:
                accuracy = trainer.accuracy()
                loss = metrics["train/loss"]
                print(f"warm start: step {number}  loss {loss:.3f}  held-out {accuracy:.3f}", flush=True)
                ready = number >= warm.min_steps and warm.accuracy_low <= accuracy <= warm.accuracy_high
                if ready:
                    break
        if not ready:
            raise DataError(
                f"the warm start ended at a held-out accuracy of {accuracy:.3f}, not within prepare.warm_start."
                f"accuracy_low = {warm.accuracy_low} and accuracy_high = {warm.accuracy_high}; raise max_steps, or "
                "lower evaluate_every if the accuracy jumped over them"
            )
        trainer.export(str(folder / "model"))


def supervised_job(config: RLConfig, wanted: PrepareConfig, folder: Path, train: Path, validation: Path) -> SFTConfig:
    """The warm start as a supervised job: the actor's backend and ranks, the warm start's optimizer."""
    warm = wanted.warm_start
    model = ModelConfig(path=str(folder / "untrained"))
    run = config.run.model_dump() | {"total_steps": warm.max_steps}
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
