"""Held-out problems: greedy or sampled responses, their accuracy per data source, and rollouts for people to read.

Deliberately not here: when a run evaluates (`controllers/run/loop.py`), and the command that does nothing else
(`controllers/commands/evaluate.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from controllers.rollouts.producer import Producer
from controllers.watch import measures
from controllers.watch.measures import Metrics
from verl_ray.cluster.store import read
from verl_ray.config.reward import HELD_OUT
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Finish
from verl_ray.profiling.timers import Timers
from verl_ray.rewards.shaping import Shaping
from verl_ray.tracking.base import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Evaluator:
    def __init__(self, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert config.data.validation_path is not None, "the configuration requires it where there is an evaluation"
        self._config, self._tokenizer = config, tokenizer
        source = PromptSource(config.data.validation_path, tokenizer, config.data, config.run.seed)
        self._prompts = source.all(config.evaluation.num_prompts)
        self._shaping = Shaping(config)

    def evaluate(self, producer: Producer, policy_version: int, timers: Timers) -> tuple[Metrics, list[Sample]]:
        """Accuracy of the present policy on the held-out problems, and the first rollouts as text.

        A response that a function failed to grade counts as wrong, any other failed score is left out; and
        val-aux/failed_scores counts them.
        """
        wanted = self._config.evaluation
        buffer = RolloutBuffer(wanted.group_size, self._config.rollout.staleness)
        with timers("testing"):
            producer.begin(self._prompts, producer.evaluation(), buffer)
            experience = producer.take(self._prompts, buffer, policy_version, timers)
        raw = measures.graded(experience.scores)
        graded = self._shaping.weigh(raw)
        sources = np.repeat(self._prompts.data_source.texts(), wanted.group_size).tolist()
        by_function = HELD_OUT in raw or self._config.reward.kind == "function"
        metrics = (measures.accuracy if by_function else measures.held_out_reward)(sources, graded, wanted.group_size)
        metrics |= measures.of_components(raw, "val-aux/reward")
        metrics |= {
            "val-aux/failed_scores": float((~graded.ok).sum()),
            "val-aux/num_prompts": float(self._prompts.num_rows),
            "val-aux/response_length/mean": float(experience.rollouts.row("response_length").mean()),
        }
        shown = np.arange(min(wanted.samples, len(experience.rollouts)))
        rows = read(experience.rollouts.select(shown), self._config.run.stall_s)
        samples = [
            Sample(
                prompt=self._text(rows.tokens[start : start + prompt]),
                response=self._text(rows.tokens[start + prompt : end]),
                answer=answer,
                data_source=source,
                score=float(score),
                truncated=bool(finish == Finish.LENGTH),
            )
            for start, end, prompt, answer, source, score, finish in zip(
                rows.offsets, rows.offsets[1:], rows.prompt_length, rows.answer.texts(), rows.data_source.texts(),
                graded.score[shown], rows.finish, strict=False,
            )
        ]  # fmt: skip
        return metrics, samples

    def _text(self, tokens: np.ndarray) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
