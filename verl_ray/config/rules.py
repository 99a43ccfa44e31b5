"""The rules over several fields, one small function each, collected in `RULES`.

Invariant: every rule runs, and every problem is reported at once with its key, its value, the rule and what would be
right. A setting that another one makes meaningless is refused, never ignored. Deliberately not here: rules of a single
field (`schema.py`), and what only the machine knows, such as files and memory (`controllers/preflight.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, meta

from verl_ray.config.schema import (
    Config,
    FsdpBackend,
    FunctionReward,
    HttpReward,
    MixedReward,
    ModelReward,
    OptimizerConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    SupervisedRole,
)
from verl_ray.config.suggest import closest, either, nearest_divisors
from verl_ray.config.vllm_arguments import VLLM_ARGUMENTS
from verl_ray.errors import Problem

GROUP_BASELINES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Advantages that compare the responses to one prompt with each other."""
DISCOUNTED = frozenset({"gae", "reinforce_plus_plus"})
"""Advantages computed per token, with a discount."""

ATTENTION_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the rollout engine's attention takes on a CPU."""

VLLM_ARGS_OF_OTHER_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "generation_config": "rollout.temperature",
    "override_generation_config": "rollout.temperature",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "rollout.num_replicas",
    "max_model_len": "rollout.max_response_tokens",
    "seed": "run.seed",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.kv_cache_gib",
    "enable_sleep_mode": "rollout.sleep",
    "distributed_executor_backend": "rollout.tensor_parallel",
}
"""Arguments of the rollout engine that a key of this configuration sets, and the key."""

VLLM_ARGS_FIXED = {
    "logprobs_mode": "the trainer compares with log-probs after temperature",
    "skip_tokenizer_init": "the engine takes and gives token ids as it stands",
    "load_format": "weights come from model.path as safetensors, or from the trainer",
    "disable_log_stats": "the project measures the engine itself",
    "use_tqdm_on_load": "the engine's process has no terminal",
    "worker_cls": "the worker class is what frees memory and receives weights",
    "worker_extension_cls": "the worker class is what frees memory and receives weights",
    "weight_transfer_config": "weights reach the engine through the project's own transport",
}
"""Arguments of the rollout engine that the project depends on, and why."""

VLLM_ARGS_FIXED_ON_A_CPU = {
    "enforce_eager": "compiled graphs are for GPUs",
    "enable_chunked_prefill": "seeded sampling needs it off",
}
"""The same for a machine without GPUs, which only preflight knows."""

TEMPLATE_FIELDS = ("prompt", "response", "answer", "data_source", "extra")
"""What a judge's template may show: the fields of a `rewards.process.ScoreRequest`."""

VLLM_LEAST_TEMPERATURE = 0.01
"""Above 0, which is greedy, the sampler takes nothing lower."""


@dataclass(frozen=True)
class Overridden:
    """The dotted keys that the user set on the command line; `critic.backend` stands for a whole section."""

    keys: Collection[str]
    evaluates: bool
    """The command is one evaluation, whatever run.evaluate_every says."""

    def under(self, section: str) -> list[str]:
        """The overridden keys that are `section` or lie inside it."""
        return sorted(key for key in self.keys if key == section or key.startswith(f"{section}."))


Rule = Callable[[Config, Overridden], Iterator[Problem]]
RLRule = Callable[[RLConfig, Overridden], Iterator[Problem]]


def broken(config: Config, overridden: Collection[str] = (), *, evaluates: bool = False) -> list[Problem]:
    """Every rule that `config` breaks; `overridden` are the dotted keys set on the command line, and `evaluates` says
    that the command is one evaluation instead of training."""
    keys = Overridden(overridden, evaluates)
    problems = [problem for rule in RULES for problem in rule(config, keys)]
    if isinstance(config, RLConfig):
        problems += [problem for rl_rule in RL_RULES for problem in rl_rule(config, keys)]
    return problems


# ------------------------------------------------------------------------------------------- rules of every run


def evaluation_has_data(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.data.validation_path is not None:
        return
    if overridden.evaluates:
        yield Problem(
            "data.validation_path", None, "an evaluation needs held-out problems", "Set data.validation_path to a file."
        )
    elif config.run.evaluate_every:
        yield Problem(
            "data.validation_path",
            None,
            f"run.evaluate_every={config.run.evaluate_every} needs held-out problems",
            "Set data.validation_path to a file, or run.evaluate_every=0.",
        )


def evaluation_is_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.run.evaluate_every == 0 and not overridden.evaluates:
        yield from _ignored(overridden.under("evaluation"), config, "run.evaluate_every=0 turns evaluation off")


def checkpoints_are_kept(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.run.checkpoint_every == 0:
        reason = "run.checkpoint_every=0 writes no checkpoints"
        yield from _ignored(overridden.under("run.keep_checkpoints"), config, reason)


def resume_is_a_choice_or_a_path(config: Config, _: Overridden) -> Iterator[Problem]:
    resume = config.run.resume
    if resume.strip() == "" or (resume not in ("auto", "none") and resume.lower() in ("auto", "none", "true", "false")):
        yield Problem("run.resume", resume, "no such choice", "Use auto, none, or the path of a checkpoint.")


def run_has_a_name(config: Config, _: Overridden) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", config.run.name) or config.run.name in (".", ".."):
        fix = "Use letters, digits, dots, - and _ ; run.dir takes a path."
        yield Problem("run.name", config.run.name, "the name of a run is also the name of its folder", fix)
    if not config.run.dir.strip():
        yield Problem("run.dir", config.run.dir, "the run needs a folder to write to", "Use outputs/NAME.")


def stopping_is_measured(config: Config, _: Overridden) -> Iterator[Problem]:
    if isinstance(config, SFTConfig) and config.sft.stop_at_accuracy is not None and config.run.evaluate_every == 0:
        rule = "the accuracy is measured by evaluating, and run.evaluate_every=0 turns that off"
        fix = "Use null, or run.evaluate_every=10."
        yield Problem("sft.stop_at_accuracy", config.sft.stop_at_accuracy, rule, fix)


def wandb_settings_are_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    if config.tracking.wandb.mode == "disabled":
        keys = [key for key in overridden.under("tracking.wandb") if key != "tracking.wandb.mode"]
        yield from _ignored(keys, config, "tracking.wandb.mode=disabled writes nothing there")


def schedule_settings_are_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    for key, optimizer in _optimizers(config):
        if optimizer.schedule == "constant":
            reason = f"{key}.schedule=constant has no end to decay to"
            yield from _ignored(overridden.under(f"{key}.min_lr_fraction"), config, reason)


def micro_batch_holds_the_longest_row(config: Config, _: Overridden) -> Iterator[Problem]:
    if isinstance(config, RLConfig):
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        sizes = "data.max_prompt_tokens + rollout.max_response_tokens"
    else:
        longest, sizes = config.longest_row
    if isinstance(config, RewardModelConfig):
        longest, sizes = 2 * longest, f"2 x {sizes}: the rows of a pair stay together"
    for name, role in config.model_roles.items():
        if isinstance(role, ModelReward):
            continue  # its tokenizer decides; rows that are too long get no score, and are counted
        cap = role.backend.micro_batch_tokens_per_rank
        if cap * role.peers < longest:
            least = -(-longest // role.peers)
            shared = f", which {role.peers} ranks share" if role.peers > 1 else ""
            yield Problem(
                f"{name}.backend.micro_batch_tokens_per_rank",
                cap,
                f"a row may have {longest} tokens ({sizes}) and must fit into one micro-batch{shared}",
                f"The nearest value that works is {least}; or shorten the rows.",
            )


def peers_divide_the_ranks(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        if role.num_ranks % role.peers:
            sizes = [size for size in range(1, role.num_ranks + 1) if role.num_ranks % size == 0]
            rule = f"{name}.num_ranks={role.num_ranks} ranks are cut into groups of this size"
            yield Problem(f"{name}.backend.sequence_parallel", role.peers, rule, f"Use {either(sizes)}.")


def shards_divide_the_ranks(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        backend = role.backend
        if not isinstance(backend, FsdpBackend):
            continue
        key, hybrid = f"{name}.backend.shard_size", backend.sharding == "hybrid"
        sizes = [size for size in range(2, role.num_ranks) if role.num_ranks % size == 0]
        if hybrid and not sizes:
            rule = f"{name}.num_ranks={role.num_ranks} cannot be cut into equal groups of more than one rank"
            fix = "Use full, or a number of ranks that can, such as 4."
            yield Problem(f"{name}.backend.sharding", "hybrid", rule, fix)
        elif hybrid and backend.shard_size not in sizes:
            rule = f"{name}.num_ranks={role.num_ranks} ranks are cut into groups of this size"
            yield Problem(key, backend.shard_size, rule, f"Use {either(sizes)}.")
        elif not hybrid and backend.shard_size is not None:
            rule = f"this setting would be ignored: {name}.backend.sharding={backend.sharding} has no groups"
            yield Problem(key, backend.shard_size, rule, "Set it to null, or use sharding=hybrid.")


# ----------------------------------------------------------------------------- rules of reinforcement learning


def mini_batches_divide_the_rows(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    prompts, group_size = config.data.prompts_per_step, config.rollout.group_size
    rows = prompts * group_size
    roles = {"actor": config.actor} | ({"critic": config.critic} if config.has_critic else {})
    for name, role in roles.items():
        size = role.mini_batch_size
        if size is not None and rows % size:
            nearest = nearest_divisors(rows, size)
            yield Problem(
                f"{name}.mini_batch_size",
                size,
                f"it must divide the {rows} rows of a step, "
                f"data.prompts_per_step={prompts} x rollout.group_size={group_size}",
                f"The nearest that do are {either(nearest)}; null takes all rows at once.",
            )


def group_baseline_has_a_group(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.algorithm.advantage in GROUP_BASELINES and config.rollout.group_size < 2:
        yield Problem(
            "rollout.group_size",
            config.rollout.group_size,
            f"algorithm.advantage={config.algorithm.advantage} compares the responses to one prompt with each other",
            "Use at least 2 (8 is usual), or algorithm=ppo or algorithm=reinforce_plus_plus.",
        )


def shared_processes_have_equal_ranks(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    """Colocated roles on one kind of backend share a process per rank."""
    if config.placement.kind != "colocated":
        return
    leads: dict[str, str] = {}
    for name, role in config.model_roles.items():
        lead = leads.setdefault(role.backend.kind, name)
        expected = config.model_roles[lead].num_ranks
        if role.num_ranks != expected:
            yield Problem(
                f"{name}.num_ranks",
                role.num_ranks,
                f"colocated roles on one backend share a process per rank, and {lead}.num_ranks={expected}",
                f"Use {name}.num_ranks={expected}, {lead}.num_ranks={role.num_ranks}, placement=separate, "
                f"or another backend for one of them (backend@{name}.backend=...).",
            )


def advantage_has_its_settings(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    wants = {"gamma": algorithm.advantage in DISCOUNTED, "lam": algorithm.advantage == "gae"}
    for field, wanted in wants.items():
        value = getattr(algorithm, field)
        usual = 1.0 if field == "gamma" else 0.95
        yield from _iff(wanted, f"algorithm.{field}", value, f"algorithm.advantage={algorithm.advantage}", usual)


def gae_has_a_critic(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    needs = algorithm.advantage == "gae"
    if needs and algorithm.value_loss is None:
        fix = "Set algorithm.value_loss={clip: 0.2, aggregation: token_mean}, or another algorithm.advantage."
        yield Problem("algorithm.value_loss", None, "algorithm.advantage=gae needs a critic, which learns by it", fix)
    if not needs and algorithm.value_loss is not None:
        rule = f"algorithm.advantage={algorithm.advantage} uses no critic"
        fix = "Set algorithm.value_loss=null, or algorithm=ppo."
        yield Problem("algorithm.value_loss", algorithm.value_loss.model_dump(), rule, fix)


def critic_settings_are_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.has_critic:
        if config.algorithm.critic_warmup_steps >= config.run.total_steps:
            yield Problem(
                "algorithm.critic_warmup_steps",
                config.algorithm.critic_warmup_steps,
                f"the actor would never learn in the {config.run.total_steps} steps of run.total_steps",
                f"Use at most {config.run.total_steps - 1}.",
            )
        return
    reason = f"algorithm={config.algorithm.name} makes no critic"
    yield from _ignored(overridden.under("critic"), config, reason)
    if config.algorithm.critic_warmup_steps:
        fix = "Set it to 0, or choose algorithm=ppo."
        yield Problem("algorithm.critic_warmup_steps", config.algorithm.critic_warmup_steps, reason, fix)


def reference_settings_are_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if not config.has_reference:
        yield from _ignored(overridden.under("reference"), config, "algorithm.kl.place=none makes no reference")


def kl_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    charged = kl.place != "none"
    because = f"algorithm.kl.place={kl.place}"
    usual: dict[str, object] = {"estimator": "k3", "coefficient": 0.001, "controller": "fixed"}
    for field, value in usual.items():
        yield from _iff(charged, f"algorithm.kl.{field}", getattr(kl, field), because, value)


def kl_in_the_loss_has_a_gradient(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.estimator == "k1":
        rule = "as a loss, the expected gradient of k1 is zero: it would only add noise"
        yield Problem("algorithm.kl.estimator", kl.estimator, rule, "Use k2 or k3, or algorithm.kl.place=reward.")


def reinforce_updates_once(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    actor, rows = config.actor, config.data.prompts_per_step * config.rollout.group_size
    if config.algorithm.policy_loss != "reinforce":
        return
    rule = "reinforce has no ratio that would correct a second update on the same rollouts"
    if actor.epochs > 1:
        yield Problem("actor.epochs", actor.epochs, rule, "Set it to 1, or use algorithm.policy_loss=ppo_clip.")
    if actor.mini_batch_size is not None and actor.mini_batch_size < rows:
        fix = f"Set it to null or {rows}, or use algorithm.policy_loss=ppo_clip."
        yield Problem("actor.mini_batch_size", actor.mini_batch_size, rule, fix)


def kl_controller_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    kl = config.algorithm.kl
    adaptive = kl.controller == "adaptive"
    if adaptive and kl.place == "loss":
        rule = "the adaptive controller steers a penalty in the reward, not one in the loss"
        yield Problem("algorithm.kl.controller", kl.controller, rule, "Use fixed, or algorithm.kl.place=reward.")
    because = f"algorithm.kl.controller={'null' if kl.controller is None else kl.controller}"
    yield from _iff(adaptive, "algorithm.kl.target", kl.target, because, 6.0)
    yield from _iff(adaptive, "algorithm.kl.horizon", kl.horizon, because, 10_000)


def clipping_belongs_to_ppo(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    clipped = algorithm.policy_loss == "ppo_clip"
    because = f"algorithm.policy_loss={algorithm.policy_loss}"
    yield from _iff(clipped, "algorithm.clip_low", algorithm.clip_low, because, 0.2)
    yield from _iff(clipped, "algorithm.clip_high", algorithm.clip_high, because, 0.2)
    if not clipped and algorithm.dual_clip is not None:
        yield from _iff(False, "algorithm.dual_clip", algorithm.dual_clip, because, None)


def horizon_belongs_to_its_aggregation(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    yield from _iff(
        algorithm.aggregation == "seq_mean_token_sum_norm",
        "algorithm.aggregation_horizon",
        algorithm.aggregation_horizon,
        f"algorithm.aggregation={algorithm.aggregation}",
        config.rollout.max_response_tokens,
    )
    if algorithm.value_loss is not None and algorithm.value_loss.aggregation == "seq_mean_token_sum_norm":
        rule = "the value loss has no horizon to normalise by"
        key = "algorithm.value_loss.aggregation"
        yield Problem(key, algorithm.value_loss.aggregation, rule, "Use token_mean or seq_mean_token_mean.")


def bootstrapping_needs_values(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.truncated == "bootstrap" and algorithm.advantage != "gae":
        rule = f"a cut response is bootstrapped from a critic, and algorithm.advantage={algorithm.advantage} has none"
        yield Problem("algorithm.truncated", "bootstrap", rule, "Use score or mask, or algorithm=ppo.")


def algorithm_name_is_its_group(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if overridden.under("algorithm.name"):
        name = config.algorithm.name
        rule = "the name is a label and changes nothing"
        yield Problem("algorithm.name", name, rule, f"Choose an algorithm with algorithm={name}.")


def sampling_is_what_the_trainer_sees(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.temperature == 0:
        rule = "training needs sampled responses, and the trainer divides its logits by this"
        yield Problem("rollout.temperature", 0.0, rule, "Use 1.0; evaluation.temperature=0 is greedy.")
    for field, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != whole:
            rule = "the trainer's log-probs are of the whole vocabulary, which a truncated sampler does not draw from"
            fix = f"Use {whole}; rollout.temperature sharpens sampling without truncating it."
            yield Problem(f"rollout.{field}", value, rule, fix)


def temperature_is_not_too_low(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    settings = {"rollout": config.rollout.temperature, "evaluation": config.evaluation.temperature}
    for section, value in settings.items():
        if 0 < value < VLLM_LEAST_TEMPERATURE:
            rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
            greedy = ", or 0 for greedy" if section == "evaluation" else ""
            yield Problem(f"{section}.temperature", value, rule, f"Use at least {VLLM_LEAST_TEMPERATURE}{greedy}.")


def greedy_evaluation_needs_one_response(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.evaluation.temperature == 0 and config.evaluation.group_size > 1:
        rule = "with evaluation.temperature=0 all responses to a problem are the same"
        fix = "Use 1, or a temperature above 0."
        yield Problem("evaluation.group_size", config.evaluation.group_size, rule, fix)


def vllm_args_are_free(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    yield from _vllm_args("rollout", config.rollout.vllm_args, VLLM_ARGS_OF_OTHER_KEYS, VLLM_ARGS_FIXED)
    fixed = VLLM_ARGS_FIXED | {"enable_sleep_mode": "a judge shares its devices with nobody and never sleeps"}
    for section, judge in config.judges.items():
        engine = {name: re.sub("^rollout", f"{section}.engine", key) for name, key in VLLM_ARGS_OF_OTHER_KEYS.items()}
        setters = engine | {
            "model": f"{section}.model.path",
            "tokenizer": f"{section}.model.path",
            "generation_config": f"{section}.temperature",
            "override_generation_config": f"{section}.temperature",
            "max_model_len": f"{section}.max_prompt_tokens",
        }
        del setters["enable_sleep_mode"]
        yield from _vllm_args(f"{section}.engine", judge.engine.vllm_args, setters, fixed)


def _vllm_args(
    section: str, arguments: Mapping[str, object], setters: Mapping[str, str], fixed: Mapping[str, str]
) -> Iterator[Problem]:
    for name, value in sorted(arguments.items()):
        key = f"{section}.vllm_args.{name}"
        if setter := setters.get(name):
            yield Problem(key, value, f"{setter} sets this argument", f"Leave it out and set {setter}.")
        elif reason := fixed.get(name):
            yield Problem(key, value, f"this argument may not change: {reason}", "Leave it out.")
        elif name not in VLLM_ARGUMENTS:
            own = [argument for argument in VLLM_ARGUMENTS if argument not in {*setters, *fixed}]
            near = closest(name, own)
            fix = f"Did you mean {either(near)}?" if near else "Use the name of a field of vLLM's EngineArgs."
            yield Problem(key, value, "vLLM has no such engine argument", fix)


def rewards_have_a_function(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    functions = {
        f"{key}.functions": one.functions for key, one in config.graders.items() if isinstance(one, FunctionReward)
    }
    if config.evaluation.functions is not None:
        functions["evaluation.functions"] = config.evaluation.functions
    for key, given in functions.items():
        if not given:
            fix = f"Set {key}={{default: exact_match}}."
            yield Problem(key, {}, "no data source has a reward function", fix)


def held_out_deadline_is_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.evaluation.functions is None:
        keys = overridden.under("evaluation.deadline_s")
        yield from _ignored(keys, config, "evaluation.functions=null leaves grading to the reward, with its deadline")


def graders_keep_the_deadline_of_calls(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    limits = {
        key: one.deadline_s for key, one in config.graders.items() if isinstance(one, FunctionReward | HttpReward)
    }
    if config.evaluation.functions is not None:
        limits["evaluation"] = config.evaluation.deadline_s
    for key, deadline_s in limits.items():
        if deadline_s > config.run.call_deadline_s:
            rule = (
                f"run.call_deadline_s={config.run.call_deadline_s} ends the run before this ends a response's grading"
            )
            fix = f"Use at most {config.run.call_deadline_s}, or raise run.call_deadline_s."
            yield Problem(f"{key}.deadline_s", deadline_s, rule, fix)


def frozen_models_keep_no_activations(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    frozen = [name for name, role in config.model_roles.items() if not isinstance(role, SupervisedRole)]
    for name in frozen:
        for field in ("activation_checkpointing", "activation_offload"):
            keys = overridden.under(f"{name}.backend.{field}")
            yield from _ignored(keys, config, "this model does not learn, so it keeps no activations")


def normalised_scores_matter(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    """Group baselines subtract a mean of their own."""
    if config.algorithm.advantage not in GROUP_BASELINES or isinstance(config.reward, MixedReward):
        return
    if config.reward.normalise != "none" and config.reward.clip is None and config.algorithm.advantage == "grpo":
        rule = "algorithm.advantage=grpo compares within a group and divides by its deviation, which undoes this"
        fix = "Set it to none, or give reward.clip as well."
        yield Problem("reward.normalise", config.reward.normalise, rule, fix)


def mixed_rewards_have_weights(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    reward = config.reward
    if not isinstance(reward, MixedReward):
        return
    if not reward.components:
        fix = "Set reward=function, or give components in a YAML file of your own (--config-dir)."
        yield Problem("reward.components", {}, "there is nothing to mix", fix)
    for name in sorted(reward.components):
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            rule = "the name of a component is part of keys and of metrics"
            yield Problem(f"reward.components.{name}", reward.components[name].kind, rule, "Use letters, digits and _.")
    for name in sorted(reward.components.keys() - reward.weights.keys()):
        rule = f"the component {name} has no weight"
        yield Problem(f"reward.weights.{name}", None, rule, f"Set reward.weights.{name}=1.0.")
    for name in sorted(reward.weights.keys() - reward.components.keys()):
        near = closest(name, reward.components)
        fix = (
            f"Did you mean {either(near)}?" if near else f"Leave it out; there are {either(sorted(reward.components))}."
        )
        yield Problem(f"reward.weights.{name}", reward.weights[name], f"there is no component {name}", fix)
    for name, weight in sorted(reward.weights.items()):
        if weight == 0 and name in reward.components:
            rule = "this component would be computed and then ignored"
            yield Problem(f"reward.weights.{name}", weight, rule, "Give it a weight, or leave the component out.")


def judges_can_be_asked(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    for section, judge in config.judges.items():
        if judge.lowest >= judge.highest:
            fix = f"Set it above {judge.lowest}."
            yield Problem(f"{section}.highest", judge.highest, f"it must be above {section}.lowest", fix)
        if (problem := verdict_problem(judge.verdict)) is not None:
            fix = r"Use one group around the number, e.g. 'score: *(\d+)'."
            yield Problem(f"{section}.verdict", judge.verdict, problem, fix)
        if (problem := template_problem(judge.template)) is not None:
            fix = f"Write {{{{ response }}}} where the response goes; {either(TEMPLATE_FIELDS)} can be shown."
            yield Problem(f"{section}.template", judge.template, problem, fix)
        if 0 < judge.temperature < VLLM_LEAST_TEMPERATURE:
            rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
            fix = f"Use at least {VLLM_LEAST_TEMPERATURE}, or 0 for greedy."
            yield Problem(f"{section}.temperature", judge.temperature, rule, fix)


def template_problem(template: str) -> str | None:
    """What is wrong with a judge's template, if anything."""
    try:
        shown = meta.find_undeclared_variables(Environment().parse(template))
    except TemplateError as error:
        return f"this is no template ({error})"
    if unknown := sorted(shown.difference(TEMPLATE_FIELDS)):
        near = closest(unknown[0], TEMPLATE_FIELDS)
        return f"there is no {unknown[0]} to show" + (f" (did you mean {either(near)}?)" if near else "")
    return None if "response" in shown else "the judge would not see the response"


def verdict_problem(pattern: str) -> str | None:
    """What is wrong with a judge's verdict pattern, if anything."""
    try:
        verdict = re.compile(pattern)
    except re.error as error:
        return f"this is no regular expression ({error})"
    if verdict.groups != 1:
        return f"it must have one group, which holds the score, and has {verdict.groups}"
    return "it finds a verdict in an empty answer" if verdict.search("") else None


def requests_end_before_their_batch(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    for section, service in config.graders.items():
        if isinstance(service, HttpReward) and service.request_timeout_s > service.deadline_s:
            rule = f"{section}.deadline_s={service.deadline_s} bounds a batch with all its requests"
            fix = f"Use at most {service.deadline_s}, or raise the deadline."
            yield Problem(f"{section}.request_timeout_s", service.request_timeout_s, rule, fix)


def inputs_are_made_or_given(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    """A run that makes its inputs uses them."""
    if config.prepare is None:
        return
    for key in ("model.path", "data.train_path", "data.validation_path"):
        fix = f"Leave {key} out, or set prepare=null to bring inputs of your own."
        yield from _ignored(overridden.under(key), config, "prepare makes this input itself", fix)


def prepared_data_exists(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.prepare is None:
        return
    pairs = (config.prepare.max_operand + 1) ** 2
    wanted = config.prepare.num_train + config.prepare.num_validation
    if wanted > pairs:
        yield Problem(
            "prepare.max_operand",
            config.prepare.max_operand,
            f"there are {pairs} problems with operands up to that, and prepare.num_train + prepare.num_validation "
            f"asks for {wanted} different ones",
            f"Use at least {_operand_for(wanted)}, or fewer problems.",
        )
    asked, made = config.evaluation.num_prompts, config.prepare.num_validation
    if asked is not None and asked > made:
        rule = f"prepare.num_validation={made} makes fewer held-out problems"
        yield Problem("evaluation.num_prompts", asked, rule, f"Use at most {made}, or null for all.")


def prepared_model_is_possible(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    if config.prepare is None:
        return
    model = config.prepare.model
    if model.num_heads % model.num_kv_heads:
        nearest = nearest_divisors(model.num_heads, model.num_kv_heads)
        rule = f"it must divide prepare.model.num_heads={model.num_heads}"
        yield Problem("prepare.model.num_kv_heads", model.num_kv_heads, rule, f"The nearest are {either(nearest)}.")
    parallel = config.rollout.tensor_parallel
    if model.num_heads % parallel:
        nearest = nearest_divisors(model.num_heads, parallel)
        rule = f"it must divide prepare.model.num_heads={model.num_heads}"
        yield Problem("rollout.tensor_parallel", parallel, rule, f"The nearest that do are {either(nearest)}.")
    if model.head_size not in ATTENTION_HEAD_SIZES:
        nearest = sorted(sorted(ATTENTION_HEAD_SIZES, key=lambda size: abs(size - model.head_size))[:2])
        rule = "the rollout engine's attention does not take this size on a CPU"
        yield Problem("prepare.model.head_size", model.head_size, rule, f"The nearest are {either(nearest)}.")


def warm_start_leaves_room(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.prepare is None or overridden.evaluates:
        return
    warm, gain = config.prepare.warm_start, config.prepare.min_gain
    if warm.accuracy_low >= warm.accuracy_high:
        rule = f"the range ends at prepare.warm_start.accuracy_high={warm.accuracy_high}"
        fix = "Set accuracy_low below accuracy_high."
        yield Problem("prepare.warm_start.accuracy_low", warm.accuracy_low, rule, fix)
    if warm.accuracy_high + gain > 1:
        rule = f"accuracy cannot rise by that much from prepare.warm_start.accuracy_high={warm.accuracy_high}"
        yield Problem("prepare.min_gain", gain, rule, f"Use at most {1 - warm.accuracy_high:g}.")
    if gain and config.run.evaluate_every == 0:
        rule = "a gain is measured by evaluating, and run.evaluate_every=0 turns that off"
        yield Problem("prepare.min_gain", gain, rule, "Use 0, or evaluate.")
    if gain and config.reward.kind != "function" and config.evaluation.functions is None:
        rule = f"the gain is one of accuracy, which reward={config.reward.kind} does not measure"
        yield Problem("prepare.min_gain", gain, rule, "Use 0, or evaluation.functions={default: exact_match}.")
    if gain and config.evaluation.temperature:
        rule = "the gain is one of greedy accuracy"
        yield Problem("evaluation.temperature", config.evaluation.temperature, rule, "Use 0, or prepare.min_gain=0.")


RULES: tuple[Rule, ...] = (
    run_has_a_name,
    resume_is_a_choice_or_a_path,
    evaluation_has_data,
    evaluation_is_used,
    stopping_is_measured,
    checkpoints_are_kept,
    wandb_settings_are_used,
    schedule_settings_are_used,
    micro_batch_holds_the_longest_row,
    peers_divide_the_ranks,
    shards_divide_the_ranks,
)

RL_RULES: tuple[RLRule, ...] = (
    mini_batches_divide_the_rows,
    group_baseline_has_a_group,
    shared_processes_have_equal_ranks,
    advantage_has_its_settings,
    gae_has_a_critic,
    critic_settings_are_used,
    reference_settings_are_used,
    kl_is_complete,
    kl_in_the_loss_has_a_gradient,
    reinforce_updates_once,
    kl_controller_is_complete,
    clipping_belongs_to_ppo,
    horizon_belongs_to_its_aggregation,
    bootstrapping_needs_values,
    algorithm_name_is_its_group,
    sampling_is_what_the_trainer_sees,
    temperature_is_not_too_low,
    greedy_evaluation_needs_one_response,
    vllm_args_are_free,
    rewards_have_a_function,
    held_out_deadline_is_used,
    graders_keep_the_deadline_of_calls,
    frozen_models_keep_no_activations,
    normalised_scores_matter,
    mixed_rewards_have_weights,
    judges_can_be_asked,
    requests_end_before_their_batch,
    inputs_are_made_or_given,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_room,
)


# ------------------------------------------------------------------------------------------------ parts of rules


def _iff(wanted: bool, key: str, value: object, because: str, usual: object) -> Iterator[Problem]:
    """`key` has a value exactly when `wanted`."""
    if wanted and value is None:
        yield Problem(key, None, f"{because} needs it", f"{usual} is usual.")
    if not wanted and value is not None:
        yield Problem(key, value, f"{because} does not use it", "Set it to null.")


def _ignored(keys: list[str], config: Config, reason: str, fix: str = "Leave it out.") -> Iterator[Problem]:
    """Settings that the user made and the run would not look at."""
    for key in keys:
        yield Problem(key, _value(config, key), f"this setting would be ignored: {reason}", fix)


def _value(config: Config, key: str) -> object:
    node: object = config.model_dump()
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else None
    return node["kind"] if isinstance(node, dict) and "kind" in node else node


def _optimizers(config: Config) -> Iterator[tuple[str, OptimizerConfig]]:
    if not isinstance(config, RLConfig):
        name, role = config.learner
        yield f"{name}.optimizer", role.optimizer
    else:
        yield "actor.optimizer", config.actor.optimizer
        yield "critic.optimizer", config.critic.optimizer
        if config.prepare is not None:
            yield "prepare.warm_start.optimizer", config.prepare.warm_start.optimizer


def _operand_for(problems: int) -> int:
    """The smallest largest operand with at least that many pairs."""
    operand = 0
    while (operand + 1) ** 2 < problems:
        operand += 1
    return operand
