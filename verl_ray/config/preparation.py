"""What a run makes itself before it starts: problems, a tokenizer, and a tiny model warmed up on them.

Deliberately not here: making them (`controllers/run/preparation.py`).
"""

from __future__ import annotations

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
    """Supervised training of the new model, stopped at a held-out greedy accuracy within [low, high]."""

    accuracy_low: Fraction
    accuracy_high: Fraction
    wrong_fraction: Fraction
    """Share of the demonstrations whose response is wrong: what imitation gets wrong, a reward can put right."""
    batch_size: Positive
    evaluate_every: Positive
    min_steps: NonNegative
    """Train at least this long, also when the accuracy is there earlier: a policy that can do nothing else yet
    learns little from rewards."""
    max_steps: Positive
    optimizer: OptimizerConfig


class PrepareConfig(Section):
    """The run makes its own inputs under run.dir/inputs before training: `a+b=` problems, tokenizer, model."""

    max_operand: Positive
    num_train: Positive
    num_validation: Positive
    model: TinyModelConfig
    warm_start: WarmStartConfig
    min_gain: Fraction
    """The run fails unless held-out greedy accuracy rises by at least this much."""
