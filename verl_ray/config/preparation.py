"""The inputs that a run makes itself: problems, a tokenizer, and a tiny model.

Deliberately not here: making them (`controllers/run/preparation.py`).
"""

from __future__ import annotations

from typing import Literal

from verl_ray.config.roles import OptimizerConfig
from verl_ray.config.section import Fraction, NonNegative, Positive, Section


class TinyModelConfig(Section):
    """A Qwen3-style model whose vocabulary is exactly the tokenizer's."""

    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_size: Positive
    intermediate_size: Positive
    tie_embeddings: bool


class WarmStartConfig(Section):
    """Supervised training of the new model before reinforcement learning.

    It stops at a held-out greedy accuracy within [accuracy_low, accuracy_high].
    """

    accuracy_low: Fraction
    accuracy_high: Fraction
    wrong_fraction: Fraction
    """Fraction of the demonstrations whose response is wrong, so that rewards have
    something to put right."""
    batch_size: Positive
    """Rows per optimizer step."""
    evaluate_every: Positive
    """Optimizer steps from one measurement of the accuracy to the next."""
    min_steps: NonNegative
    """Fewest steps, also when the accuracy is reached earlier: a policy that can do
    nothing else yet learns little from rewards."""
    max_steps: Positive
    """Most steps."""
    optimizer: OptimizerConfig


class PrepareConfig(Section):
    """Inputs that the run makes under run.dir/inputs before it trains.

    They are problems, a tokenizer for them, and a model.
    """

    problems: Literal["sums", "word_problems"]
    """sums = `27+10=`; word_problems = a question in words, whose response ends in
    `#### 37` as those of GSM8K do."""
    max_operand: Positive
    """The largest operand of a problem."""
    num_train: Positive
    """Number of problems to train on."""
    num_validation: Positive
    """Number of held-out problems."""
    model: TinyModelConfig
    warm_start: WarmStartConfig
    min_gain: Fraction
    """The run fails unless held-out greedy accuracy rises by at least this much."""

    @property
    def wordings(self) -> int:
        """Number of training problems with the same numbers, in different words."""
        return 4 if self.problems == "word_problems" else 1
