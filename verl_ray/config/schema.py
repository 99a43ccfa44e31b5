"""The classes of the configuration: types, rules of single fields, and one-line meanings. No defaults.

Invariant: YAML under `configs/` holds every value; a field absent there is an error, and so is a key absent here.
Deliberately not here: rules over several fields (`rules`), reading YAML (the command line), and anything about
the machine the run will use (`controllers/preflight.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's range; random streams made from it fit torch's 64 bits
Temperature = Annotated[float, Field(ge=0, le=2)]  # vLLM's range


class Section(BaseModel):
    """A frozen part of the configuration that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# ---------------------------------------------------------------------------------------------------- the run


class RunConfig(Section):
    name: str
    """Name of the run: its folder, and its name in W&B."""
    dir: str
    """Where everything the run writes goes."""
    seed: Seed
    """Root of every random stream: data order, sampling, new parameters."""
    total_steps: Positive
    """Training steps in all, those before a resume included."""
    evaluate_every: NonNegative
    """Evaluate before the first step and every N steps; 0 = never."""
    checkpoint_every: NonNegative
    """Write a checkpoint every N steps and after the last one; 0 = never."""
    keep_checkpoints: Positive
    """How many of the newest checkpoints stay on disk."""
    resume: str
    """auto = from the newest checkpoint in run.dir if there is one; none = refuse a run.dir that has one; or a path."""
    threads_per_rank: Positive | Literal["auto"]
    """CPU threads of each worker process; auto keeps the total within the cores."""
    max_skipped_steps: Positive
    """Optimizer steps of a role without finite gradients, one after another, before the run stops. Each is skipped."""
    call_deadline_s: PositiveFloat
    """How long one call on a worker may take before the run stops and shows where it is stuck."""
    start_deadline_s: PositiveFloat
    """How long the worker processes may take to start."""


class RayConfig(Section):
    address: str | None
    """Address of a running cluster; null = RAY_ADDRESS, else a cluster of the run's own."""


class ModelConfig(Section):
    path: str
    """Directory of a Hugging Face model: config.json, safetensors, tokenizer."""


class DataFilesConfig(Section):
    """Where rows come from and how they become tokens; all that a supervised run needs."""

    train_path: str
    """A .jsonl or .parquet file, or a folder saved by Hugging Face datasets."""
    validation_path: str | None
    """The same for held-out problems; needed when run.evaluate_every > 0."""
    overlong: Literal["refuse", "skip"]
    """What happens to a longer prompt or row: the run refuses to start, or it is left out and counted."""
    shuffle: bool
    """Draw in an order seeded by run.seed and the epoch, instead of the file's order."""
    apply_chat_template: bool | Literal["auto"]
    """Whether prompts go through the tokenizer's chat template; auto = when it has one."""


class PreferenceDataConfig(DataFilesConfig):
    """Pairs of responses to one prompt, of which one is better."""

    unusable: Literal["refuse", "skip"]
    """What happens to a pair whose responses are equal or empty: the run refuses to start, or it is left out and
    counted."""


class DataConfig(DataFilesConfig):
    prompts_per_step: Positive
    """Prompts drawn from train_path for each step."""
    max_prompt_tokens: Positive
    """The longest prompt, in tokens after the chat template."""


# ------------------------------------------------------------------------------------------------ the backends


class EngineBackend(Section):
    kind: Literal["engine"]
    dtype: Literal["float32", "bfloat16"]
    """Type of the forward and backward computation; master weights, log-probs and losses are always float32."""
    micro_batch_tokens_per_rank: Positive
    """The most tokens one rank takes through the model at once."""
    activation_checkpointing: bool
    """Recompute each layer's activations in the backward pass instead of keeping them."""

    @property
    def peers(self) -> int:
        """Neighbouring ranks that are given the same rows, and compute them together."""
        return 1


class FsdpBackend(Section):
    kind: Literal["fsdp"]
    dtype: Literal["float32", "bfloat16"]
    """As for the engine backend."""
    micro_batch_tokens_per_rank: Positive
    """As for the engine backend."""
    activation_checkpointing: bool
    """As for the engine backend."""
    sharding: Literal["full", "grad_op", "hybrid", "none"]
    """What ranks share out. full: parameters, gradients and optimizer state; grad_op: the same, but a layer's gathered
    parameters are kept from its forward to its backward pass; hybrid: as full within groups of shard_size ranks, which
    hold copies of each other; none: every rank holds everything."""
    shard_size: Positive | None
    """Ranks per group with sharding=hybrid; null elsewhere."""
    accumulate: Literal["whole", "sharded"]
    """Gradients of several micro-batches. whole: each rank keeps all of them, and they are summed over ranks and cut
    into shards once, in the last; sharded: in every one, which is slower and needs memory for shards alone."""
    prefetch_layers: NonNegative
    """Layers whose parameters are gathered ahead of the one that computes, forward and backward; 0 = one, as torch
    itself does. More hide a slow network, for memory."""
    host_parameters: bool
    """Keep parameters, gradients and optimizer state on the host for good; a layer comes to the device to compute, and
    the optimizer steps on the host."""
    embedding_units: bool
    """Gather embeddings and language head by themselves, only while they are used; false = together, for the whole
    pass. Tied ones are one parameter, used at both ends: there it must be false."""
    read_weights: Literal["every_rank", "rank_zero"]
    """Who reads the model's directory: every rank its own slices, or rank 0 each tensor, which it sends to all; the
    latter spares a slow file system, and needs the directory on one node only."""
    activation_offload: bool
    """Keep what the backward pass needs of the forward pass on the host."""
    sequence_parallel: Positive
    """Ranks that compute the same rows together, each a slice of their tokens (Ulysses); 1 = every rank has rows of its
    own. It must divide the ranks of the role and the attention heads of the model."""

    @property
    def peers(self) -> int:
        """As of the engine backend."""
        return self.sequence_parallel


Backend = Annotated[EngineBackend | FsdpBackend, Field(discriminator="kind")]


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101); weight decay spares norms and biases."""

    lr: NonNegativeFloat
    betas: Annotated[tuple[Fraction, Fraction], Field(examples=["[0.9,0.999]"])]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat | None
    """Clip the global gradient norm to this; null = no clipping."""
    schedule: Literal["constant", "cosine"]
    warmup_steps: NonNegative
    """Optimizer steps over which the learning rate rises linearly from 0."""
    min_lr_fraction: Fraction
    """Where a cosine schedule ends, as a fraction of lr."""


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685) that learns while the model's own weights are frozen."""

    rank: NonNegative
    """Inner size of the adapter's matrices; 0 = no adapter: all parameters learn."""
    alpha: Positive
    """What the adapter adds is scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1, examples=["[q_proj,v_proj]"])]
    """Names of the linear layers that get one."""


# --------------------------------------------------------------------------------------------------- the roles


class ModelRole(Section):
    """A role that runs a model."""

    model: ModelConfig
    num_ranks: Positive
    """Data-parallel ranks (processes; GPUs where there are any)."""
    backend: Backend

    @property
    def peers(self) -> int:
        """Neighbouring ranks that are given the same rows, and compute them together."""
        return self.backend.peers


class SupervisedRole(ModelRole):
    """The model that a supervised run trains."""

    optimizer: OptimizerConfig
    lora: LoraConfig
    expert_balance: NonNegativeFloat | None
    """Weight of the loss that spreads tokens over experts evenly; null = what the model's config.json says
    (router_aux_loss_coef). For models without experts it stays null."""


class TrainedRole(SupervisedRole):
    """A role that learns from rollouts: the actor or the critic."""

    mini_batch_size: Positive | None
    """Rollouts per optimizer step, over all ranks; null = all rollouts of the step."""
    epochs: Positive
    """Passes over the rollouts of one step."""


class ReferenceRole(ModelRole):
    """The frozen policy that the divergence is measured from."""


class RolloutEngineConfig(Section):
    """One vLLM engine, whoever asks it."""

    num_replicas: Positive
    """Independent engines."""
    tensor_parallel: Positive
    """Ranks per replica."""
    dtype: Literal["float32", "bfloat16"]
    kv_cache_gib: PositiveFloat
    """Memory for the key-value cache of one replica rank."""
    vllm_args: Annotated[dict[str, Any], Field(examples=["{block_size: 32}"])]
    """Further arguments of vLLM's engine, verbatim; those that another key sets are refused."""


class Grader(Section):
    """What every source of scores has."""

    normalise: Literal["none", "batch", "running"]
    """Shift and scale scores to mean 0 and standard deviation 1: over each step, over all steps so far, or not."""
    clip: PositiveFloat | None
    """Hold scores, once normalised, within [-clip, clip]; null = no clipping."""
    max_failed_fraction: Fraction
    """Stop the run when more than this fraction of a step's scores failed."""


class FunctionReward(Grader):
    """Scores by Python functions in killable processes."""

    kind: Literal["function"]
    num_ranks: Positive
    """Ray actors that score; each is CPU only."""
    processes_per_rank: Positive
    """Killable processes per actor: responses scored at the same time."""
    deadline_s: PositiveFloat
    """How long one response may take to score before its process is killed and the failure counted."""
    functions: Annotated[dict[str, str], Field(examples=["{default: exact_match}"])]
    """Data source -> exact_match, gsm8k, or path/to/file.py:function; `default` serves the other data sources."""


class ModelReward(Grader, ModelRole):
    """Scores by a sequence-classification model with one label, on a backend."""

    kind: Literal["model"]


class JudgeReward(Grader):
    """Scores by a language model that is asked for a verdict."""

    kind: Literal["judge"]
    model: ModelConfig
    engine: RolloutEngineConfig
    template: str
    """What the judge is asked: a Jinja template with prompt, response, answer, data_source and extra."""
    verdict: str
    """Regular expression whose last match in the judge's response holds the score in its one group."""
    lowest: float
    """The least score that the judge may give; what lies outside is no verdict."""
    highest: float
    """The greatest score that it may give."""
    max_prompt_tokens: Positive
    """The longest question to the judge; a response that makes it longer has no score."""
    max_response_tokens: Positive
    temperature: Temperature
    """0 = greedy."""


class HttpReward(Grader):
    """Scores by a service: JSON over HTTP."""

    kind: Literal["http"]
    num_ranks: Positive
    """Ray actors that ask; each is CPU only and has limits of its own."""
    url: str
    """Where items are posted."""
    token_env: str | None
    """Environment variable of the workers that holds a bearer token; null = none is sent."""
    batch_size: Positive
    """Responses per request."""
    concurrency: Positive
    """Requests in flight at the same time."""
    requests_per_s: PositiveFloat | None
    """Rate limit; null = none."""
    request_timeout_s: PositiveFloat
    """How long the service may take for one request before it counts as failed."""
    deadline_s: PositiveFloat
    """How long one batch may take, all its attempts and waits included."""
    max_attempts: Positive
    """Requests per batch, the first included."""
    backoff_s: PositiveFloat
    """Wait before the second attempt; it doubles with each further one, with jitter."""
    circuit_failures: Positive
    """Batches that fail in a row before the circuit opens: nothing is sent any more and every score fails at once."""
    circuit_reset_s: PositiveFloat
    """How long the circuit stays open before one batch may try again."""


SingleReward = Annotated[FunctionReward | ModelReward | JudgeReward | HttpReward, Field(discriminator="kind")]


class MixedReward(Section):
    """A weighted sum of several scores. A response that one of them cannot score has none."""

    kind: Literal["mixed"]
    components: dict[str, SingleReward]
    """Name -> where scores come from; the name is part of the metrics."""
    weights: Annotated[dict[str, float], Field(examples=["{function: 1.0, model: 0.5}"])]
    """Name -> factor of its scores, once normalised and clipped."""


Reward = Annotated[FunctionReward | ModelReward | JudgeReward | HttpReward | MixedReward, Field(discriminator="kind")]


class RolloutConfig(RolloutEngineConfig):
    group_size: Positive
    """Responses per prompt."""
    max_response_tokens: Positive
    temperature: Temperature
    """Of the sampler; the trainer divides its logits by the same."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: int
    """-1 = all tokens."""
    stream_rows: Positive
    """Finished responses are handed on to the reward role once this many are ready."""
    sleep: Literal["auto", "never", "kv_cache", "weights"]
    """What a replica frees while the trainer works; auto = weights on a GPU it shares with the trainer, else never."""


class EvaluationConfig(Section):
    num_prompts: Positive | None
    """The first N held-out problems; null = all."""
    group_size: Positive
    """Responses per problem; the metric is acc/mean@N."""
    temperature: Temperature
    """0 = greedy."""
    samples: NonNegative
    """Rollouts of each evaluation written to samples/ and the tracker's table."""
    functions: Annotated[dict[str, str], Field(examples=["{default: exact_match}"])] | None
    """Grade held-out responses by these functions instead of the reward; null = by the reward."""
    deadline_s: PositiveFloat
    """How long one held-out response may take to grade, where evaluation.functions does it."""


# ----------------------------------------------------------------------------------------------- the algorithm

AdvantageName = Literal["gae", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
PolicyLossName = Literal["ppo_clip", "reinforce"]
AggregationName = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


class KLConfig(Section):
    place: Literal["none", "reward", "loss"]
    """Where the divergence from the reference policy is charged; none = no reference role is created."""
    estimator: KLEstimator | None
    coefficient: NonNegativeFloat | None
    """The coefficient, or its first value under the adaptive controller."""
    controller: Literal["fixed", "adaptive"] | None
    target: PositiveFloat | None
    """Adaptive controller: the divergence per response it steers to."""
    horizon: Positive | None
    """Adaptive controller: rollouts over which it acts."""


class ValueLossConfig(Section):
    clip: PositiveFloat | None
    """Clip the new value to within this of the old one; null = no clipping."""
    aggregation: AggregationName


class AlgorithmConfig(Section):
    name: str
    advantage: AdvantageName
    gamma: Fraction | None
    """Discount; for gae and reinforce_plus_plus only."""
    lam: Fraction | None
    """GAE's lambda; for gae only."""
    whiten_advantages: bool
    """Shift and scale the advantages of a step to mean 0 and standard deviation 1 over all response tokens."""
    policy_loss: PolicyLossName
    clip_low: PositiveFloat | None
    clip_high: PositiveFloat | None
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; ppo_clip only."""
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Lower bound of the surrogate at negative advantages, as a multiple of the advantage; null = none."""
    aggregation: AggregationName
    """How token losses become one number."""
    aggregation_horizon: Positive | None
    """Constant length of seq_mean_token_sum_norm; null elsewhere."""
    entropy_coefficient: NonNegativeFloat
    kl: KLConfig
    value_loss: ValueLossConfig | None
    """null = no critic is created."""
    critic_warmup_steps: NonNegative
    """Steps in which only the critic learns."""
    truncated: Literal["score", "bootstrap", "mask"]
    """A response cut at the length limit: scored as it stands, its value bootstrapped (gae), or not in the loss."""


class PlacementConfig(Section):
    kind: Literal["colocated", "separate"]
    """Whether actor, critic, reference and rollout share bundles (and devices), or have their own."""


# ------------------------------------------------------------------------------------------------ the trackers


class WandbConfig(Section):
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: Annotated[tuple[str, ...], Field(examples=["[first,second]"])]


class TrackingConfig(Section):
    console: bool
    """A live line per step."""
    tensorboard: bool
    wandb: WandbConfig


# ---------------------------------------------------------------------------------------- what a run makes itself


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


# ------------------------------------------------------------------------------------------------ root configs


class RLConfig(Section):
    """One reinforcement-learning run: `train --config-name ppo | grpo | quickstart`."""

    task: Literal["rl"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    actor: TrainedRole
    critic: TrainedRole
    reference: ReferenceRole
    reward: Reward
    evaluation: EvaluationConfig
    algorithm: AlgorithmConfig
    placement: PlacementConfig
    tracking: TrackingConfig
    prepare: PrepareConfig | None

    @property
    def has_critic(self) -> bool:
        """Whether a critic role is created."""
        return self.algorithm.value_loss is not None

    @property
    def has_reference(self) -> bool:
        """Whether a reference role is created."""
        return self.algorithm.kl.place != "none" and not self.reference_is_base

    @property
    def reference_is_base(self) -> bool:
        """Whether the actor without its adapter is the reference, so that nobody holds a second copy of it."""
        adapted = self.actor.lora.rank > 0 and self.reference.model.path == self.actor.model.path
        return adapted and self.algorithm.kl.place != "none"

    @property
    def graders(self) -> dict[str, SingleReward]:
        """Where scores come from, by the key of its section, which is also the name of the role."""
        if isinstance(self.reward, MixedReward):
            return {f"reward.components.{name}": one for name, one in self.reward.components.items()}
        return {"reward": self.reward}

    @property
    def judges(self) -> dict[str, JudgeReward]:
        """The graders that are language models."""
        return {name: one for name, one in self.graders.items() if isinstance(one, JudgeReward)}

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend and are created, by name."""
        roles: dict[str, ModelRole] = {"actor": self.actor}
        if self.has_critic:
            roles["critic"] = self.critic
        if self.has_reference:
            roles["reference"] = self.reference
        return roles | {name: one for name, one in self.graders.items() if isinstance(one, ModelReward)}


class SupervisedConfig(Section):
    batch_size: Positive
    """Rows per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    stop_at_accuracy: Fraction | None
    """Stop once held-out greedy accuracy reaches this; null = train for run.total_steps."""


class SupervisedEvaluationConfig(Section):
    num_prompts: Positive | None
    """The first N held-out rows; null = all. Greedy accuracy and loss are read from one forward pass."""


class SFTConfig(Section):
    """One supervised run: `train --config-name sft`."""

    task: Literal["sft"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: DataFilesConfig
    actor: SupervisedRole
    sft: SupervisedConfig
    evaluation: SupervisedEvaluationConfig
    tracking: TrackingConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend, by name."""
        return {"actor": self.actor}

    @property
    def learner(self) -> tuple[str, SupervisedRole]:
        """The one role, and its name."""
        return "actor", self.actor

    @property
    def rows_per_step(self) -> int:
        return self.sft.batch_size

    @property
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the key that sets it."""
        return self.sft.max_tokens, "sft.max_tokens"


class PreferenceConfig(Section):
    batch_size: Positive
    """Pairs per optimizer step, over all ranks."""
    max_tokens: Positive
    """The longest row, prompt and response together, in tokens."""
    margin: NonNegativeFloat | Literal["record"]
    """By how much the chosen response should score higher; record = each pair's own `margin`."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    """How often the preference is taken to be the wrong way round."""


class PreferenceEvaluationConfig(Section):
    num_pairs: Positive | None
    """The first N held-out pairs; null = all."""


class RewardModelConfig(Section):
    """One reward model trained on preferences: `train --config-name reward_model`."""

    task: Literal["reward_model"]
    run: RunConfig
    ray: RayConfig
    model: ModelConfig
    data: PreferenceDataConfig
    reward: SupervisedRole
    preference: PreferenceConfig
    evaluation: PreferenceEvaluationConfig
    tracking: TrackingConfig

    @property
    def model_roles(self) -> dict[str, ModelRole]:
        """The roles that run a model on a backend, by name."""
        return {"reward": self.reward}

    @property
    def learner(self) -> tuple[str, SupervisedRole]:
        """The one role, and its name."""
        return "reward", self.reward

    @property
    def rows_per_step(self) -> int:
        """Two per pair."""
        return 2 * self.preference.batch_size

    @property
    def longest_row(self) -> tuple[int, str]:
        """In tokens, and the key that sets it."""
        return self.preference.max_tokens, "preference.max_tokens"


SupervisedRun = SFTConfig | RewardModelConfig
"""Runs that learn from a data set alone."""

Config = RLConfig | SFTConfig | RewardModelConfig
