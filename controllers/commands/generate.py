"""The command `generate`: a file of prompts becomes a file of responses.

Prompts go through the replicas piece by piece, and each piece is on the disk before the
one after the next begins, so a stopped command goes on where it was.

Invariant: a response follows from the model, its prompt, the sampling and run.seed, so
neither the pieces nor a stop change the file, as far as the engine computes the same
bits in every batch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from controllers.commands.evaluate import Candidate, measuring, only_candidate
from controllers.commands.generation import RequestedResponses
from controllers.rollouts.evaluator import HeldOutResponses
from controllers.rollouts.production import generation_to_evaluate
from controllers.trainers.base import read_data
from controllers.trainers.rl import Problems, Trainer
from controllers.watch import score_entries
from verl_ray.algorithms.groups import GroupMembers
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Finish, Float32, Prompts, Rollouts
from verl_ray.config.reward import JudgeReward, MixedReward, ModelReward
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.piecewise import PiecewiseFile
from verl_ray.errors import ConfigError, Problem
from verl_ray.ops.outputs import TopTokens
from verl_ray.preflight.model_files import digest_of_weights
from verl_ray.profiling.phases import Timers, phase
from verl_ray.rewards.shaping import response_scores
from verl_ray.settings.function_specs import parts_of
from verl_ray.settings.section import Section
from verl_ray.tracking.held_out_responses import HeldOutResponse
from workers.actor import ActorWorker
from workers.generation import GENERATION, Generation

Record = dict[str, Any]


def generate(config: Config, requested: RequestedResponses) -> int:
    """Generate responses, write those that are chosen, and print how many there are.

    Args:
        config: Configuration as the user gave it, which may hold `auto`.
        requested: The responses that are written, and their file.

    Raises:
        ConfigError: The task has no rollouts, or has episodes.
    """
    _require_responses(config)
    assert isinstance(config, RLConfig)
    candidate = only_candidate(config)
    # What files can tell is told before any process starts.
    data = read_data(config, trains=False)
    _require_possible(config, data, requested)
    generation = replace(generation_to_evaluate(config), purpose=GENERATION)
    request = _request(config, candidate, data, requested)
    pieces = _pieces(data, config.data.prompts_per_step)

    counts: Counter[str] = Counter()
    with PiecewiseFile(requested.output, request, "--output") as file:
        missing = [number for number in range(len(pieces)) if number not in file]
        if missing:
            if len(missing) < len(pieces):
                there = len(pieces) - len(missing)
                print(f"{there} of {len(pieces)} pieces are there; the others follow")
            with measuring(config, [candidate], data) as begin:
                trainer = begin(candidate).trainer
                assert isinstance(trainer, Trainer)
                writer = ResponseWriter(trainer, data, generation, requested)
                counts = writer.write(pieces, missing, file)
        file.finish(len(pieces))

    written, total = counts["records"], counts["responses"]
    del counts["records"], counts["responses"]
    others = [f"{count} {reason}" for reason, count in counts.items() if count]
    more = f" ({', '.join(others)})" if others else ""
    output = requested.output
    print(f"{output}: {written} records of {total} new responses{more}", flush=True)
    return 0


def _require_responses(config: Config) -> None:
    assert isinstance(config, RLConfig), "its evaluations have a temperature"
    if config.episodes is not None:
        rule = "generate writes single responses, and episodes have several"
        fix = "Leave the environments out; evaluate writes episodes."
        environments = dict(config.agent.environments)
        raise ConfigError([Problem("agent.environments", environments, rule, fix)])


def _require_possible(
    config: RLConfig, data: Problems, requested: RequestedResponses
) -> None:
    """Raise ConfigError for what no response can fulfil."""
    problems = []
    vocabulary, count = len(data.tokenizer), requested.top_log_probs
    if count > vocabulary:
        rule = f"the tokenizer of the model has {vocabulary} tokens"
        problems.append(Problem("--top-logprobs", count, rule, "Use a smaller number."))
    if requested.choice == "pairs" and config.evaluation.group_size < 2:
        rule = "each prompt gets one response, which is no pair"
        problems.append(Problem("--n", 1, rule, "Use at least 2."))
    if problems:
        raise ConfigError(problems)


def _pieces(data: Problems, size: int) -> list[Prompts]:
    """Return the prompts in pieces of at most `size`."""
    assert data.held_out is not None
    rows = np.arange(data.held_out.num_rows)
    return [
        data.held_out.select(rows[start : start + size])
        for start in range(0, len(rows), size)
    ]


def _request(
    config: RLConfig,
    candidate: Candidate,
    data: Problems,
    requested: RequestedResponses,
) -> dict[str, object]:
    """Return all that the contents of the file follow from, by the keys of it.

    How fast it is made, and how long a grader may take, is none of it.
    """
    assert data.held_out is not None
    evaluation, rollout = config.evaluation, config.rollout
    weights: object = digest_of_weights(config.actor.model.folder)
    if candidate.checkpoint is not None:
        files = candidate.checkpoint.files.items()
        records = sorted((name, repr(record)) for name, record in files)
        weights = hashlib.blake2b(repr(records).encode(), digest_size=8).hexdigest()
    return {
        "model.path": candidate.model,
        "the weights": weights,
        "rollout": _content_of_engine(rollout),
        "data.train_path": _digest(data.held_out),
        "data.prompts_per_step": config.data.prompts_per_step,
        "run.seed": config.run.seed,
        "--n": evaluation.group_size,
        "rollout.temperature": evaluation.temperature,
        "rollout.top_p": evaluation.top_p,
        "rollout.top_k": evaluation.top_k,
        "rollout.max_response_tokens": rollout.max_response_tokens,
        "rollout.stop": rollout.stop,
        "reward": content_of_reward(config),
        "--keep": requested.choice,
        "--min-score": requested.min_score,
        "--with-cut": requested.with_cut,
        "--top-logprobs": requested.top_log_probs,
    }


def content_of_reward(config: RLConfig) -> dict[str, object]:
    """Return what decides scores: settings, users' files, and weights of models."""
    settings: dict[str, object] = {}
    files = {}
    weights = {}
    if isinstance(config.reward, MixedReward):
        settings["weights"] = config.reward.weights
    for key, grader in config.graders.items():
        # Sections in it are a model, and what computes it.
        settings[key] = {
            name: value
            for name, value in grader.model_dump(mode="json").items()
            if name not in _LIMITS and not isinstance(getattr(grader, name), Section)
        }
        if isinstance(grader, JudgeReward):
            settings[f"{key}.engine"] = _content_of_engine(grader.engine)
        if isinstance(grader, ModelReward):
            settings[f"{key}.backend"] = str(grader.backend.compute_dtype)
        for spec in (grader.named_functions or {}).values():
            path = Path(parts_of(spec)[0].rpartition(":")[0])
            if path.is_file():
                files[str(path)] = hashlib.blake2b(
                    path.read_bytes(), digest_size=8
                ).hexdigest()
        model = getattr(grader, "model", None)
        if model is not None:
            weights[key] = digest_of_weights(model.folder)
    return {"settings": settings, "files": files, "weights": weights}


_LIMITS = frozenset(
    (
        "num_ranks", "processes_per_rank", "deadline_s", "max_failed_fraction",
        "concurrency", "requests_per_s", "request_timeout_s", "max_attempts",
        "backoff_s", "max_outage_s", "batch_size", "token_env", "normalise", "clip",
    )
)  # fmt: skip
"""Settings of a grader that change no score."""


def _content_of_engine(engine: RolloutEngineConfig) -> dict[str, object]:
    """Return what decides the numbers that an engine computes."""
    names = {"dtype", "quantization", "vllm_args"}
    return engine.model_dump(mode="json", include=names)


class ResponseWriter:
    """Writer of the responses of a model, as the records of a file."""

    def __init__(
        self,
        trainer: Trainer,
        data: Problems,
        generation: Generation,
        requested: RequestedResponses,
    ) -> None:
        """Take the trainer of the model, and what is requested of its responses."""
        self.trainer = trainer
        self.config = trainer.config
        self.tokenizer = data.tokenizer
        self.generation = generation
        self.requested = requested
        self.counts: Counter[str] = Counter()
        # Engines may have to sleep while the trainer computes log-probs.
        self.takes_turns = (
            requested.top_log_probs > 0
            and not trainer.replicas.device_sharing.moves_nothing
        )

    def write(
        self, pieces: Sequence[Prompts], missing: Sequence[int], file: PiecewiseFile
    ) -> Counter[str]:
        """Write the missing pieces; return how many responses were what."""
        done, total = len(pieces) - len(missing), len(pieces)
        with phase(lambda: f"{done} of {total} pieces are written") as progress:
            for number, experience in self._generated(pieces, missing):
                records = self._records(pieces[number], experience)
                self.counts["records"] += file.write(number, records)
                done += 1
                progress.reach(done, total, "pieces")
        return self.counts

    # --------------------------------------------------------------------- responses

    def _generated(
        self, pieces: Sequence[Prompts], missing: Sequence[int]
    ) -> Iterator[tuple[int, Experience]]:
        """Yield the scored responses of the missing pieces.

        Two pieces are always in work, unless trainer and engines take turns.
        """
        producer, version = self.trainer.producer, self.trainer.policy_version
        timers = Timers()
        buffers: dict[int, RolloutBuffer] = {}

        def begin(number: int) -> None:
            buffers[number] = RolloutBuffer(self.generation.group_size, staleness=0)
            producer.begin(pieces[number], self.generation, buffers[number], version)

        ahead = 0 if self.takes_turns else 1
        for place, number in enumerate(missing):
            for later in missing[place : place + ahead + 1]:
                if later not in buffers:
                    begin(later)
            ordinals = pieces[number].group_id
            yield number, producer.take(ordinals, buffers[number], version, timers)
            del buffers[number]
            is_last = place == len(missing) - 1
            if self.takes_turns and not is_last:
                # The engines have the weights again after it.
                self.trainer.publish(version)

    # ----------------------------------------------------------------------- records

    def _records(self, prompts: Prompts, experience: Experience) -> Iterable[Record]:
        """Return the records of a piece."""
        scores = self.trainer.shaping.weigh(response_scores(experience.scores))
        stall_s = self.config.run.stall_s
        responses = list(
            HeldOutResponses(
                experience,
                scores.score,
                score_entries.read_entries(experience.scores, stall_s),
                experience.response_lengths,
                self.tokenizer,
                self.config,
            )
        )
        is_usable = self._usable(experience, responses)
        self.counts["responses"] += len(responses)
        self.counts["without a score"] += int((is_usable & ~scores.ok).sum())
        score = np.where(scores.ok & is_usable, scores.score, np.nan)

        prompt_records = _prompt_records(prompts)
        if self.requested.choice == "pairs":
            return self._pairs(prompt_records, responses, score)
        rows = self._chosen(score, is_usable)
        group_size = self.generation.group_size
        records = [
            prompt_records[row // group_size] | _response_record(responses[row])
            for row in rows.tolist()
        ]
        if not self.requested.top_log_probs or not records:
            return records
        return self._with_top_log_probs(experience.select(rows), records)

    def _usable(
        self, experience: Experience, responses: Sequence[HeldOutResponse]
    ) -> Bool:
        """Return which responses have ended by themselves with a text, bool [rows]."""
        finish = experience.rollouts.row("finish")
        is_left_out = {
            "given up": finish == Finish.ABORTED,
            "cut": (finish == Finish.LENGTH) & (not self.requested.with_cut),
            "empty": np.array([not each.response.strip() for each in responses]),
        }
        is_usable = np.ones(len(responses), np.bool_)
        for reason, applies in is_left_out.items():
            self.counts[reason] += int((is_usable & applies).sum())
            is_usable &= ~applies
        return is_usable

    def _chosen(self, score: Float32, is_usable: Bool) -> Int64:
        """Return the rows of the responses that are written."""
        if self.requested.choice == "best":
            best, _ = best_and_worst(score, self.generation.group_size)
            rows = best[best >= 0]
        else:
            rows = np.flatnonzero(is_usable)
        if self.requested.min_score is None:
            return rows
        # A response without a score is none that is good enough.
        is_good = score[rows] >= self.requested.min_score
        self.counts["below --min-score"] += int((~is_good).sum())
        return rows[is_good]

    def _pairs(
        self,
        prompt_records: Sequence[Record],
        responses: Sequence[HeldOutResponse],
        score: Float32,
    ) -> list[Record]:
        """Return a record for each prompt whose responses differ in score and text."""
        lowest = self.requested.min_score
        places = best_and_worst(score, self.generation.group_size)
        records = []
        for prompt, best, worst in zip(prompt_records, *places, strict=True):
            better, worse = responses[best], responses[worst]
            margin = float(score[best] - score[worst])
            if best < 0 or not margin > 0 or better.response == worse.response:
                self.counts["prompts without a pair"] += 1
            elif lowest is not None and better.score < lowest:
                self.counts["pairs below --min-score"] += 1
            else:
                pair = {
                    "chosen": better.response,
                    "rejected": worse.response,
                    "margin": margin,
                    "chosen_score": better.score,
                    "rejected_score": worse.score,
                }
                records.append(prompt | pair)
        return records

    def _with_top_log_probs(
        self, chosen: Experience, records: Sequence[Record]
    ) -> Iterator[Record]:
        """Yield records with the tokens of each row, and the likeliest in their places.

        Log-probs are those at temperature 1, by the trainer's forward pass.
        """
        stall_s = self.config.run.stall_s
        if self.takes_turns:
            self.trainer.replicas.free_devices()
            self.trainer.replicas.device_sharing.switch_to("training")
        top = TopTokens(self.requested.top_log_probs, len(self.tokenizer))
        call = self.trainer.system.actor.scatter(
            ActorWorker.compute_reference_log_probs, chosen.rollouts, 1.0, False, top
        )
        with phase("computing log-probs"):
            log_probs = read(call.result(), stall_s)

        rows: Rollouts = read(chosen.rollouts, stall_s)
        assert log_probs.top_tokens is not None
        assert log_probs.top_log_probs is not None
        # As text, seven more digits of each would be noise.
        numbers = log_probs.top_log_probs.astype(np.float64).round(6)
        starts = rows.offsets[:-1] + rows.prompt_length
        for number, record in enumerate(records):
            first, end = rows.offsets[number : number + 2]
            start = starts[number]
            yield record | {
                "prompt_tokens": rows.tokens[first:start].tolist(),
                "response_tokens": rows.tokens[start:end].tolist(),
                "top_tokens": log_probs.top_tokens[start:end].tolist(),
                "top_log_probs": numbers[start:end].tolist(),
            }


def best_and_worst(score: Float32, group_size: int) -> tuple[Int64, Int64]:
    """Return the row with the highest score of each group, and that with the lowest.

    Of several it is the first.

    Args:
        score: float32 [rows], NaN without one; the rows of a group are adjacent.
        group_size: Rows of a group.

    Returns:
        Two of int64 [groups]; -1 for a group without any score.
    """
    is_scored = ~np.isnan(score)
    group = np.arange(len(score)) // group_size
    groups = GroupMembers(np.where(is_scored, score, 0), group, is_scored, None)
    best = groups.first_of_groups(-groups.reward)
    worst = groups.first_of_groups(groups.reward)
    has_score = groups.size[best] > 0
    return np.where(has_score, best, -1), np.where(has_score, worst, -1)


def _response_record(response: HeldOutResponse) -> Record:
    """Return the fields of a response in its record."""
    record: Record = {"response": response.response}
    if response.entries:
        record["entries"] = response.entries
    score = None if np.isnan(response.score) else response.score
    more = {"score": score, "finish": response.finish, "member": response.member}
    return record | more


def _prompt_records(prompts: Prompts) -> list[Record]:
    """Return the fields of each prompt, as its record has them."""
    arguments = prompts.template_arguments
    own = [""] * prompts.num_rows if arguments is None else arguments.texts()
    columns = zip(
        prompts.messages.texts(),
        prompts.has_answer.tolist(),
        prompts.answer.texts(),
        prompts.data_source.texts(),
        prompts.extra.texts(),
        own,
        strict=True,
    )
    records = []
    for messages, has_answer, answer, data_source, extra, template in columns:
        record: Record = {"prompt": json.loads(messages), "data_source": data_source}
        if has_answer:
            record["answer"] = answer
        if fields := json.loads(extra or "{}"):
            record["extra"] = fields
        if fields := json.loads(template or "{}"):
            record["chat_template_kwargs"] = fields
        records.append(record)
    return records


def _digest(prompts: Prompts) -> str:
    """Return a digest of everything in the prompts."""
    content = hashlib.blake2b(prompts.offsets.tobytes(), digest_size=16)
    content.update(prompts.tokens.tobytes())
    content.update(prompts.has_answer.tobytes())
    texts_of_records = [
        prompts.messages,
        prompts.data_source,
        prompts.answer,
        prompts.extra,
        prompts.template_arguments,
    ]
    for texts in texts_of_records:
        if texts is None:
            continue
        content.update(texts.offsets.tobytes())
        content.update(texts.values.tobytes())
    return content.hexdigest()
