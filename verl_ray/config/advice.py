"""Advice for a key or a choice that does not exist: where its setting is.

The key may be one of an earlier version (`renamed.py`), of another system, or misspelt.
The tables hold the settings of verl, TRL, OpenRLHF, NeMo-RL and prime-rl, each with
what does the same here. Invariant: an answer names keys and choices that exist, and
says how to convert where the units differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from verl_ray.config.renamed import new_name
from verl_ray.suggest import closest, did_you_mean, is_alike, is_misspelt

_NOT_IN_THIS_TASK = "A run of this task has nothing to set for it; leave it out."

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")

# Not in each choice of a backend, and known to whoever chooses one.
_BACKEND_KEY = re.compile(r"(\w+\.)?backend\..+")


def advice_on(key: str, known: Sequence[str]) -> str:
    """Return a sentence that leads from a key that does not exist to one that does.

    Args:
        key: what the user typed; a flag with its dashes, too.
        known: the keys that this task has.
    """
    renamed = new_name(key)
    if renamed is not None:
        return renamed
    meant = _with_its_section(key, known)
    if meant is not None:
        return f"Did you mean {meant}?"

    # A wrong letter in a key of our own says more than what others call its last part.
    foreign = None
    if not (_has_own_section(key, known) and is_misspelt(key, known)):
        foreign = foreign_answer(key, known)
    return foreign or did_you_mean(key, known, "key")


def _with_its_section(key: str, known: Sequence[str]) -> str | None:
    """Return a key whose section, as in `agent.enviroments.x`, is spelt right.

    It is the section alone where no such key is known. None if none is misspelt.
    """
    parts = key.split(".")
    # A section at the top is a part of the likeness of the whole key.
    for length in range(2, len(parts)):
        section = ".".join(parts[:length])
        sections = {".".join(name.split(".")[:length]) for name in known}
        if section not in sections and is_misspelt(section, sections):
            (near,) = closest(section, sections, 1)
            whole = ".".join((near, *parts[length:]))
            return whole if whole in known else near
    return None


def _has_own_section(key: str, known: Sequence[str]) -> bool:
    """Return whether a key begins with a section of our own, or nearly so."""
    section, point, _ = key.partition(".")
    own = {name.partition(".")[0] for name in known}
    return bool(point) and is_alike(section, own)


def foreign_answer(key: str, known: Collection[str]) -> str | None:
    """Return a sentence that leads from a key of another system to the one here.

    None if the key is of no such system.

    Args:
        key: what the user typed; a flag with its dashes, too.
        known: the keys that this task has.
    """
    words = key.lstrip("-+~").replace("-", "_").lower().split(".")

    # The longest end of the key that is known says most.
    for start in range(len(words)):
        name = ".".join(words[start:])
        if name in FOREIGN:
            role = _role(key, known)
            sentences = [_sentence(answer, role) for answer in FOREIGN[name]]
            possible = (text for text in sentences if _is_possible(text, known))
            return next(possible, _NOT_IN_THIS_TASK)

        # Other systems nest the sections that are called the same here.
        if start and "." in name and name in known:
            return _sentence(name, "")

    # Inside of such a table the names are the user's own.
    if len(words) > 1 and words[-2].endswith("kwargs"):
        return foreign_answer(".".join(words[:-1]), known)
    return None


def keys_in(sentence: str) -> Iterator[str]:
    """Yield the keys that a sentence names."""
    for key in _KEY.findall(sentence):
        if key != "metrics.jsonl":
            yield key


def _sentence(answer: str, role: str) -> str:
    filled = answer.format(role=role)
    return filled if " " in filled else f"Here it is {filled}."


def _role(key: str, known: Collection[str]) -> str:
    """Return the role that a key of another system is about."""
    named = "actor"
    if "critic" in key:
        named = "critic"
    elif re.search(r"\bref(_|\b)", key):
        named = "reference"

    for role in (named, "actor", "reward"):
        if any(existing.startswith(f"{role}.") for existing in known):
            return role
    return named


def _is_possible(sentence: str, known: Collection[str]) -> bool:
    """Return whether a task has every key that a sentence names."""
    for key in keys_in(sentence):
        is_known = any(
            # What is inside is not known of a free section, or of one that is null.
            existing == key
            or existing.startswith(f"{key}.")
            or key.startswith(f"{existing}.")
            for existing in known
        )
        if not is_known and not _BACKEND_KEY.fullmatch(key):
            return False

    return True


def foreign_choice(group: str, choice: str) -> str | None:
    """Return a sentence that leads to what was meant; None if it is not known."""
    return FOREIGN_CHOICES.get((group, choice))


# ---------------------------------------------------------- algorithms of other systems


_CLIP = "Here they are two: algorithm.clip_low and algorithm.clip_high."
_CRITIC_KEY = "With a critic (algorithm=ppo) it is {key}; other algorithms have none."
_STD = (
    "algorithm.advantage=grpo divides by the deviation of the group,"
    " algorithm.advantage=dr_grpo does not, and lite_ppo divides by that of the batch."
)
_FILTER = (
    "algorithm.dynamic_sampling=10 draws groups of equal scores again, up to 10 groups"
    " for each that a batch holds; null does not."
)
_OVERLONG = (
    "algorithm.overlong_share is the share of rollout.max_response_tokens, 0.2 in DAPO."
    " algorithm.truncated=mask leaves responses that were cut out of the loss."
)

ALGORITHM_ANSWERS: tuple[tuple[str, str], ...] = (
    (
        "Choose algorithm=grpo, algorithm=rloo, algorithm=ppo (gae) or another one;"
        " algorithm.advantage changes this part alone.",
        "adv_estimator advantage_estimator",
    ),
    (
        "Write algorithm.kl=loss for true, algorithm.kl=none for false.",
        "use_kl_loss",
    ),
    (
        "Write algorithm.kl=reward for true, algorithm.kl=none for false.",
        "use_kl_in_reward",
    ),
    (
        "Here it is algorithm.kl.coefficient; 0 is algorithm.kl=none.",
        "beta kl_loss_coef kl_coef init_kl_coef kl_beta reference_policy_kl_penalty",
    ),
    (
        "algorithm.kl.estimator is k1 (kl), k2 (mse), k3 (low_var_kl), abs,"
        " k1_straight_through (kl+) or k3_straight_through (low_var_kl+).",
        "kl_loss_type kl_penalty kl_estimator",
    ),
    ("algorithm.kl.controller", "kl_ctrl.type"),
    ("algorithm.kl.target", "kl_target target_kl"),
    ("algorithm.kl.horizon", "kl_horizon kl_ctrl.horizon"),
    (_CLIP, "clip_ratio cliprange eps_clip epsilon clip_eps eps_clip_low_high"),
    ("algorithm.clip_low", "clip_ratio_low ratio_clip_min epsilon_low"),
    (
        "Here it is algorithm.clip_high; with algorithm=cispo algorithm.ratio_max, the"
        " bound of the ratio itself: 1.28 for a distance of 0.28.",
        "clip_ratio_high ratio_clip_max epsilon_high",
    ),
    ("algorithm.dual_clip", "clip_ratio_c ratio_clip_c delta"),
    (
        _CRITIC_KEY.format(key="algorithm.value_loss.clip"),
        "cliprange_value value_clip",
    ),
    ("Nothing to set: the critic has an optimizer of its own.", "vf_coef value_coef"),
    ("algorithm.entropy_coefficient", "entropy_coeff entropy_coef ent_coef"),
    ("algorithm.entropy_coefficient", "entropy_loss_coef"),
    (
        "algorithm.aggregation is token_mean (token-mean, dapo), seq_mean_token_mean"
        " (grpo), seq_mean_token_sum, or seq_mean_token_sum_norm (dr_grpo).",
        "loss_agg_mode token_level_loss",
    ),
    (
        "It has two parts here. algorithm=NAME chooses the loss: cispo, gspo, sapo,"
        " luspo, vespo, dapo, dr_grpo and so on; algorithm.aggregation the sum of its"
        " tokens: token_mean (dapo), seq_mean_token_mean (grpo) and so on.",
        "loss_type",
    ),
    (_STD, "norm_adv_by_std_in_grpo scale_rewards normalize_rewards"),
    ("Choose algorithm=rloo.", "use_leave_one_out_baseline"),
    ("reward.normalise", "normalize_reward"),
    (
        _FILTER,
        "filter_groups.enable filter_groups.metric filter_groups.max_num_gen_batches",
    ),
    (_FILTER, "use_dynamic_sampling dynamic_filtering"),
    (
        _OVERLONG,
        "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
    ),
    (_OVERLONG, "overlong_buffer.log overlong_buffer_len overlong_penalty_factor"),
    (
        "algorithm.policy_loss is ppo_clip (vanilla), gspo, gmpo (geo_mean), cispo,"
        " sapo, dppo_tv, clip_cov and others; algorithm=gspo and so on bring settings.",
        "policy_loss.loss_mode loss_mode importance_sampling_level",
    ),
    (
        "Here it is a share: algorithm.entropy_share=0.2 is the quantile 0.8.",
        "top_entropy_quantile",
    ),
    ("algorithm.negative_drift", "off_policy_mask_threshold"),
    (
        "Here they are algorithm.correction.rejections, by the same names, with"
        " bounds on both sides. Of k1 they bound the ratio to the sampler, and verl's"
        " bound its inverse: lower_upper there is [1 / upper, 1 / lower] here.",
        "rollout_rs rollout_rs_threshold",
    ),
    ("algorithm.correction.normalise", "rollout_is_batch_normalize"),
    ("algorithm.entropy_target", "entropy_coeff_target target_entropy"),
    ("algorithm.lam", "lambd gae_lambda"),
    (
        "Here it is algorithm.truncated=mask, or drop.",
        "mask_truncated_completions overlong_filtering",
    ),
    (
        "Here it is algorithm.correction.form=three_policy with"
        " algorithm.correction.kind=tis, algorithm.correction.level=token and"
        " algorithm.correction.upper=2.0.",
        "use_importance_sampling_correction enable_vllm_is_correction rollout_is"
        " vllm_importance_sampling_correction",
    ),
    (
        "algorithm.correction.upper",
        "vllm_is_truncated_threshold vllm_importance_sampling_cap tis_imp_ratio_cap"
        " rollout_is_threshold",
    ),
    (
        "Nothing to set: the reference (reference.model.path) stays as it is.",
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
    ),
)
"""Key or sentence -> the keys of other systems that it answers."""


# -------------------------------------------------------- all settings of other systems


_MICRO_BATCHES = (
    "Micro-batches are cut by tokens, not by rows:"
    " {role}.backend.micro_batch_tokens_per_rank."
)
_PACKED = (
    "Nothing to set: rows are packed without padding, up to"
    " {role}.backend.micro_batch_tokens_per_rank."
)
_ROLLOUTS_OF_A_STEP = (
    "It counts rollouts. Divide it by rollout.group_size for data.prompts_per_step."
)
_LENGTHS = (
    "A row may be as long as data.max_prompt_tokens + rollout.max_response_tokens; set"
    " these."
)
_NEVER_IS_0 = "Here it is {key}, in steps; 0 = never."
_TRACKERS = (
    "tracking.wandb.mode is offline, online or disabled; tracking.tensorboard=true adds"
    " TensorBoard, and metrics.jsonl is always written."
)
_RANKS = (
    "{role}.num_ranks is the number of processes over all nodes, each with one GPU: the"
    " nodes times the GPUs of each."
)
_OFFLOAD = (
    "placement.offload=all keeps the training state on the host while responses are"
    " generated; with backend=fsdp, backend.host_parameters=true keeps parameters"
    " there."
)
_KV_CACHE = (
    "rollout.kv_cache_gib is the key-value cache of a replica's rank in GiB, not a"
    " share of the device: about that share of its memory, minus the model's weights."
)
DEVICE = (
    "Nothing to set: the device is found by itself, which is a GPU per rank wherever"
    " the cluster has any."
)
"""Answer to a key that would choose a device."""
_DTYPES = (
    "backend.dtype=bfloat16 sets the trainers, rollout.dtype=bfloat16 the rollout"
    " engine."
)
_ENVIRONMENT = (
    "agent.environments.default=FILE.py:NAME names a class, a coroutine function or"
    " tools."
)
_FUNCTION = (
    "Name your function as reward.functions.default=FILE.py:FUNCTION or"
    " MODULE:FUNCTION. Functions written for verl and TRL are called as there."
)
_FIELDS = (
    "Usual columns are recognised; for others there is"
    " 'data.columns={{prompt: COLUMN, answer: COLUMN}}'."
)
_VALUE = "With a critic (algorithm=ppo) it is {key}; other algorithms have none."
_SHARDING = (
    "backend=fsdp shards: backend.sharding=full as ZeRO-3 does, grad_op as ZeRO-2;"
    " backend=engine does not shard."
)

_ANSWERS: tuple[tuple[str, str], ...] = (
    # ------------------------------------------------------------------- size of a step
    ("data.prompts_per_step", "data.train_batch_size num_prompts_per_step"),
    ("data.prompts_per_step", "rollout_batch_size gen_batch_size"),
    (
        "data.prompts_per_step is the number of prompts of a step,"
        " {role}.mini_batch_size the number of rollouts of an optimizer step.",
        "train_batch_size global_batch_size effective_batch_size",
    ),
    (_ROLLOUTS_OF_A_STEP, "orchestrator.batch_size generation_batch_size"),
    (
        "A step has data.prompts_per_step x rollout.group_size rollouts over all"
        " devices; {role}.backend.micro_batch_tokens_per_rank, in tokens, bounds what a"
        " device computes at once.",
        "per_device_train_batch_size per_gpu_train_batch_size",
    ),
    (
        "Nothing to set: the rollout engine makes its batches itself;"
        " evaluation.num_prompts is the number of held-out problems.",
        "per_device_eval_batch_size",
    ),
    (
        "Nothing to set: the {role}.mini_batch_size rollouts of an optimizer step are"
        " cut by tokens ({role}.backend.micro_batch_tokens_per_rank).",
        "gradient_accumulation_steps grad_accum_steps",
    ),
    (
        "A step generates once and learns from all of it: data.prompts_per_step x"
        " rollout.group_size rollouts, {role}.mini_batch_size in each optimizer step.",
        "steps_per_generation",
    ),
    ("sft.batch_size", "train_batch_size per_device_train_batch_size batch_size"),
    ("preference.batch_size", "train_batch_size per_device_train_batch_size"),
    ("evaluation.group_size", "val_kwargs.n num_generations_eval"),
    ("evaluation.group_size", "eval.rollouts_per_example val.rollouts_per_example"),
    ("rollout.group_size", "n rollout_n num_generations num_generations_per_prompt"),
    ("rollout.group_size", "n_samples_per_prompt rollouts_per_example num_samples"),
    (
        "{role}.mini_batch_size counts rollouts, not prompts: multiply by"
        " rollout.group_size.",
        "ppo_mini_batch_size",
    ),
    ("{role}.mini_batch_size", "train_global_batch_size minibatch_size"),
    (_MICRO_BATCHES, "ppo_micro_batch_size ppo_micro_batch_size_per_gpu"),
    (_MICRO_BATCHES, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"),
    (_MICRO_BATCHES, "forward_micro_batch_size forward_micro_batch_size_per_gpu"),
    (_MICRO_BATCHES, "micro_batch_size micro_batch_size_per_gpu"),
    (_MICRO_BATCHES, "micro_train_batch_size train_micro_batch_size"),
    (_MICRO_BATCHES, "micro_rollout_batch_size"),
    (_MICRO_BATCHES, "logprob_batch_size mini_batch_size_per_gpu"),
    (
        "{role}.backend.micro_batch_tokens_per_rank",
        "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu train_mb_tokens"
        " forward_max_token_len_per_gpu train_max_tokens_per_gpu logprob_mb_tokens",
    ),
    (_PACKED, "use_dynamic_bsz use_dynamic_batch log_prob_use_dynamic_bsz"),
    (_PACKED, "packing_samples use_remove_padding padding_free"),
    (_PACKED, "sequence_packing.enabled dynamic_batching.enabled"),
    # -------------------------------------------------------------------------- lengths
    ("data.max_prompt_tokens", "max_prompt_length prompt_max_len prompt_length"),
    ("data.max_prompt_tokens", "max_input_seq_length"),
    ("rollout.max_response_tokens", "max_response_length max_completion_length"),
    ("rollout.max_response_tokens", "generate_max_len max_new_tokens response_length"),
    ("rollout.max_response_tokens", "sampling.max_tokens"),
    ("sft.max_tokens", "max_seq_length max_length seq_len max_len"),
    ("preference.max_tokens", "max_seq_length max_length seq_len max_len"),
    (_LENGTHS, "max_total_sequence_length max_model_len seq_len max_len"),
    (_LENGTHS, "vllm_max_model_length max_seq_length max_length"),
    (
        "data.overlong=skip leaves long prompts out.",
        "filter_overlong_prompts truncation",
    ),
    # --------------------------------------------------------- duration, saves, records
    ("run.total_epochs", "epochs num_epochs total_epochs num_train_epochs"),
    ("run.total_epochs", "num_episodes max_num_epochs n_epochs"),
    ("run.total_steps", "total_training_steps max_steps max_num_steps num_train_steps"),
    ("{role}.epochs", "ppo_epochs num_iterations max_epochs num_ppo_epochs"),
    (
        _NEVER_IS_0.format(key="run.checkpoint_every"),
        "save_freq save_steps save_period save_strategy",
    ),
    (_NEVER_IS_0.format(key="run.checkpoint_every"), "ckpt.interval save_interval"),
    (_NEVER_IS_0.format(key="run.evaluate_every"), "test_freq eval_steps val_period"),
    (
        _NEVER_IS_0.format(key="run.evaluate_every"),
        "eval_strategy evaluation_strategy do_eval",
    ),
    ("run.save_at_end", "save_final save_final_checkpoint save_last"),
    (_NEVER_IS_0.format(key="run.evaluate_every"), "eval.interval eval_interval"),
    (
        "Nothing to set: run.evaluate_every > 0 evaluates before the first step, too.",
        "val_before_train val_at_start eval_on_start eval_base_model",
    ),
    ("run.keep_checkpoints", "max_actor_ckpt_to_keep max_critic_ckpt_to_keep"),
    ("run.keep_checkpoints", "max_ckpt_num save_total_limit keep_last"),
    (
        "Nothing to set: the step that is best by run.best_metric stays, besides the"
        " run.keep_checkpoints newest ones.",
        "keep_top_k",
    ),
    (
        "Nothing to set: the best step stays on disk, and `verl-ray export RUN --best`"
        " takes it.",
        "load_best_model_at_end",
    ),
    (_NEVER_IS_0.format(key="run.checkpoint_every"), "checkpointing.enabled"),
    ("run.best_metric", "metric_for_best_model best_metric checkpointing.metric_name"),
    ("run.early_stop", "early_stopping_patience early_stopping"),
    ("run.dir", "output_dir save_path ckpt_path default_local_dir checkpoint_dir"),
    (
        "run.resume is auto (from the newest checkpoint of run.dir), none, or the path"
        " of a checkpoint.",
        "resume_mode resume_from_path resume_from_checkpoint load_checkpoint"
        " resume_step",
    ),
    ("run.seed", "seed data.seed data_seed"),
    (
        "Here it is run.dir; the runs of a sweep have numbered folders in it.",
        "sweep.dir sweep.subdir",
    ),
    (
        "Nothing to set: the runs of --multirun come one after another.",
        "hydra/launcher hydra/sweeper",
    ),
    ("run.name", "experiment_name run_name exp_name wandb_run_name wandb.name"),
    ("tracking.wandb.project", "project_name wandb_project wandb.project"),
    ("tracking.wandb.group", "wandb_group"),
    ("tracking.wandb.entity", "wandb_entity wandb_org"),
    (_TRACKERS, "logger report_to use_wandb wandb_enabled use_tensorboard"),
    (_TRACKERS, "tensorboard_enabled"),
    (
        "Nothing to set: every step is a line of metrics.jsonl.",
        "logging_steps log_freq log_interval",
    ),
    ("tracking.rollouts", "rollout_data_dir save_debug_rollout_data log_rollouts"),
    (
        "Nothing to set: evaluations/ has every held-out response.",
        "validation_data_dir",
    ),
    ("evaluation.samples", "log_val_generations num_completions_to_print"),
    ("evaluation.samples", "log_completions num_val_samples_to_print"),
    # ------------------------------------------------------------------------ optimizer
    (_VALUE.format(key="critic.optimizer.lr"), "critic_learning_rate critic_lr"),
    ("{role}.optimizer.lr", "lr learning_rate actor_learning_rate actor_lr"),
    ("{role}.optimizer.weight_decay", "weight_decay l2"),
    ("{role}.optimizer.max_grad_norm", "grad_clip max_grad_norm max_norm clip_grad"),
    ("Here it is {role}.optimizer.betas=[B1,B2].", "adam_beta1 adam_beta2 adam_betas"),
    ("{role}.optimizer.eps", "adam_epsilon adam_eps"),
    ("{role}.optimizer.schedule", "lr_scheduler_type lr_scheduler warmup_style"),
    ("{role}.optimizer.schedule", "lr_decay_style"),
    (
        "Choose optimizer@{role}.optimizer=adamw, muon, adafactor or sgd.",
        "optim optimizer optimizer_type optimizer_name optim.optimizer optim.name",
    ),
    ("{role}.optimizer.momentum", "muon_momentum sgd_momentum momentum"),
    ("{role}.optimizer.decay_fraction", "lr_wsd_decay_ratio decay_ratio"),
    (
        "{role}.optimizer.warmup_steps counts optimizer steps: multiply the ratio by"
        " run.total_steps, and by the optimizer steps of a step.",
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    ),
    ("{role}.optimizer.warmup_steps", "warmup_steps lr_warmup_steps num_warmup_steps"),
    ("{role}.optimizer.warmup_steps", "lr_warmup_iters"),
    ("{role}.optimizer.min_lr_fraction", "min_lr_ratio"),
    ("Here it is a fraction of lr: {role}.optimizer.min_lr_fraction.", "min_lr"),
    ("algorithm.critic_warmup_steps", "critic_warmup"),
    *ALGORITHM_ANSWERS,
    # -------------------------------------------------------------- models and backends
    (
        "model.path, a folder or an id of the hub, is it here.",
        "pretrain model_name model_id",
    ),
    ("model.path, a folder or an id of the hub, is it here.", "model_name_or_path"),
    ("model.path, a folder or an id of the hub, is it here.", "model.name"),
    ("The tokenizer is the one in the folder model.path.", "tokenizer tokenizer_path"),
    ("model.trust_remote_code", "trust_remote_code"),
    ("critic.model.path", "critic_pretrain critic_model_path"),
    (
        "Choose reward=model with reward.model.path=FOLDER.",
        "reward_pretrain reward_model.enable reward_model.model.path reward_model_path",
    ),
    ("{role}.lora.rank", "lora_rank lora_r use_peft peft.r"),
    ("{role}.lora.alpha", "lora_alpha"),
    ("{role}.lora.targets", "target_modules lora_target_modules"),
    (DEVICE, "device device_type use_cpu no_cuda use_cuda"),
    (_DTYPES, "bf16 torch_dtype dtype precision fp16 param_dtype model_dtype"),
    ("backend.activation_checkpointing", "gradient_checkpointing"),
    ("backend.activation_checkpointing", "enable_gradient_checkpointing"),
    (_OFFLOAD, "param_offload optimizer_offload adam_offload cpu_offload grad_offload"),
    ("Choose backend=fsdp.", "dtensor_cfg.enabled fsdp_cfg.enabled"),
    ("Choose backend=megatron.", "megatron_cfg.enabled"),
    (
        "Nothing to set: each backend has the attention that packed rows need.",
        "attn_implementation attention_backend flash_attn use_flash_attn",
    ),
    (_SHARDING, "zero_stage deepspeed fsdp strategy fsdp_size reshard_after_forward"),
    (
        "backend=fsdp has backend.sequence_parallel, backend=megatron"
        " backend.context_parallel.",
        "ulysses_sequence_parallel_size ring_attn_size context_parallel_size",
    ),
    ("backend.tensor_parallel", "megatron.tensor_model_parallel_size"),
    ("backend.tensor_parallel", "megatron_cfg.tensor_model_parallel_size"),
    ("backend.pipeline_parallel", "pipeline_model_parallel_size"),
    ("backend.expert_parallel", "expert_model_parallel_size"),
    (_RANKS, "n_gpus_per_node gpus_per_node num_gpus num_processes nproc_per_node"),
    (_RANKS, "nnodes num_nodes actor_num_nodes actor_num_gpus_per_node"),
    (_RANKS, "critic_num_nodes critic_num_gpus_per_node"),
    (_RANKS, "ref_num_nodes ref_num_gpus_per_node"),
    # ------------------------------------------------------------------------- rollouts
    ("rollout.tensor_parallel", "tensor_model_parallel_size tensor_parallel_size"),
    ("rollout.tensor_parallel", "vllm_tensor_parallel_size parallel.tp"),
    ("rollout.pipeline_parallel", "vllm_pipeline_parallel_size"),
    ("rollout.expert_parallel", "enable_expert_parallel vllm_enable_expert_parallel"),
    ("rollout.quantization", "quantization vllm_quantization"),
    ("rollout.num_replicas", "vllm_num_engines num_inference_engines parallel.dp"),
    (_KV_CACHE, "gpu_memory_utilization vllm_gpu_memory_utilization"),
    ("rollout.vllm_args.enforce_eager", "enforce_eager"),
    ("rollout.vllm_args.enable_prefix_caching", "enable_prefix_caching"),
    ("rollout.vllm_args.max_num_seqs", "max_num_seqs"),
    ("rollout.vllm_args.max_num_batched_tokens", "max_num_batched_tokens"),
    ("rollout.sleep", "free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode"),
    (
        "Responses always come from vLLM: placement=colocated on the trainers' devices,"
        " placement=separate on others.",
        "use_vllm vllm_mode colocate_all_models colocated.enabled hybrid_engine"
        " generation.backend rollout.name",
    ),
    (
        "Choose schedule=asynchronous or one_step_off; rollout.staleness is the bound.",
        "max_async_level async_train staleness_threshold max_trajectory_age_steps"
        " async_grpo.enabled max_off_policy_steps max_staleness max_steps_off_policy",
    ),
    ("Choose schedule=carry_over.", "partial_rollout enable_partial_rollout"),
    # ----------------------------------------------------------------- data and rewards
    ("data.train_path", "train_files prompt_data train_data_path dataset dataset_name"),
    ("data.validation_path", "val_files eval_dataset val_data_path eval_data"),
    (
        "evaluation.num_prompts",
        "val_batch_size max_val_samples max_eval_samples eval.num_examples",
    ),
    (
        "A temperature above 0 samples: rollout.temperature, and"
        " evaluation.temperature=0 for greedy evaluations.",
        "do_sample",
    ),
    ("rollout.temperature", "temperature"),
    ("rollout.top_p", "top_p"),
    ("rollout.top_k", "top_k"),
    ("rollout.stop", "stop stop_strings stop_sequences"),
    ("evaluation.temperature", "val_kwargs.temperature eval.sampling.temperature"),
    ("evaluation.top_p", "val_kwargs.top_p eval.sampling.top_p"),
    ("evaluation.top_k", "val_kwargs.top_k eval.sampling.top_k"),
    (_FIELDS, "prompt_key input_key label_key answer_key reward_fn_key"),
    ("data.shuffle", "shuffle_dataset"),
    ("data.chat_template_kwargs", "apply_chat_template_kwargs chat_template_kwargs"),
    (
        "data.chat_template",
        "custom_chat_template tokenizer_chat_template chat_template_path",
    ),
    (
        "'data.chat_template_kwargs={{enable_thinking: false}}' gives it to the chat"
        " template.",
        "enable_thinking",
    ),
    (_FUNCTION, "custom_reward_function.path custom_reward_function.name reward_funcs"),
    (
        "A table gives a function arguments:"
        " 'reward.functions.default={{function: FILE.py:FUNCTION, ARGUMENT: VALUE}}'.",
        "custom_reward_function.reward_kwargs reward_kwargs",
    ),
    (_FUNCTION, "reward_manager reward_function reward_fn compute_score"),
    (_FUNCTION, "reward.function reward.func reward.fn reward.path reward.functions"),
    (
        _ENVIRONMENT,
        "agent.environment agent.env agent_func_path environment_factory rollout_func"
        " multi_turn.enable default_agent_loop multi_turn.tool_config_path"
        " tool_config_path",
    ),
    (
        "agent.max_turns",
        "max_assistant_turns max_rollout_turns max_tool_calling_iterations",
    ),
    ("agent.tool_parser", "multi_turn.format"),
    ("Choose reward=http with reward.url=URL.", "remote_rm_url"),
    ("Choose reward=mixed; reward.weights has them.", "reward_weights"),
)
"""Key or sentence -> the keys of other systems that it answers.

A key of another system stands for every key that ends with it, such as `lr` for
`actor.optim.lr`.
"""


def _by_name() -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    for answer, names in _ANSWERS:
        for name in names.split():
            answers.setdefault(name, []).append(answer)
    return answers


FOREIGN = _by_name()
"""Key of another system -> keys or sentences, of which the first that a task has is
the answer; `{role}` stands for a role."""


# ------------------------------------------------------------- choices of other systems


_LEARNING_RATE = (
    "The group schedule orders rollouts and training; the learning rate's schedule is"
    " actor.optimizer.schedule={choice} (critic.optimizer.schedule)."
)

# Each comes after actor.optimizer.warmup_steps.
_SCHEDULES_OF_LEARNING_RATE = {
    "constant": ("constant_with_warmup",),
    "cosine": ("cosine_with_min_lr", "cosine_with_restarts"),
    "inverse_sqrt": ("inverse_square_root", "noam"),
    "linear": ("polynomial", "linear_with_warmup"),
    "wsd": ("warmup_stable_decay",),
}

FOREIGN_CHOICES: Mapping[tuple[str, str], str] = {
    **{
        ("schedule", name): _LEARNING_RATE.format(choice=choice)
        for choice, names in _SCHEDULES_OF_LEARNING_RATE.items()
        for name in (choice, *names)
    },
    **{
        ("optimizer.schedule", name): f"Write {choice}."
        for choice, names in _SCHEDULES_OF_LEARNING_RATE.items()
        for name in names
    },
    ("schedule", "async"): "Write schedule=asynchronous.",
    ("schedule", "sync"): "Write schedule=synchronous.",
    ("schedule", "partial_rollout"): "Write schedule=carry_over.",
}
"""Sentences by group, or the end of a key, and choice."""
