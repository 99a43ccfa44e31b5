"""Ranks, shards, mini- and micro-batches, and settings of models that a run does not
have or does not train.
"""

from __future__ import annotations

from scripts.configuration import compose
from tests.config.rules.cases import INPUTS, Case

CASES = [
    Case(
        "adapter_settings_are_used",
        "critic.lora.targets=[q_proj]",
        "critic.lora.targets",
        "this setting would be ignored: critic.lora.rank=0 makes no adapter",
        "Set critic.lora.rank",
    ),
    Case(
        "reference_settings_are_used",
        "actor.lora.rank=8 backend@reference.backend=fsdp",
        "reference.backend",
        "with actor.lora.rank=8 the reference is the actor without its adapter",
        "Leave it out",
    ),
    Case(
        "revisions_are_of_the_hub",
        "reference.model.revision=v1",
        "reference.model.revision",
        "reference.model.path is a folder, and only models of the hub have commits",
        "Leave it out",
    ),
    Case(
        "schedule_settings_are_used",
        "critic.optimizer.min_lr_fraction=0.1",
        "critic.optimizer.min_lr_fraction",
        "critic.optimizer.schedule=constant has no end",
        "Leave it out",
    ),
    Case(
        "schedule_settings_are_used",
        "critic.optimizer.decay_fraction=0.2",
        "critic.optimizer.decay_fraction",
        "critic.optimizer.schedule=constant is not wsd",
        "set critic.optimizer.schedule=wsd",
    ),
    Case(
        "schedule_settings_are_used",
        "critic.optimizer.schedule=inverse_sqrt",
        "critic.optimizer.warmup_steps",
        "the rate after W steps of warm-up is lr times the root of W / step",
        "Set critic.optimizer.warmup_steps",
    ),
    Case(
        "optimizers_have_a_backend",
        "backend@actor.backend=megatron optimizer@actor.optimizer=muon",
        "actor.optimizer.kind",
        "actor.backend=megatron does not have this optimizer",
        "optimizer@actor.optimizer=adamw, backend@actor.backend=engine or backend@actor.backend=fsdp",
    ),
    Case(
        "optimizers_have_a_backend",
        "backend=fsdp optimizer@prepare.warm_start.optimizer=adafactor",
        "prepare.warm_start.optimizer.kind",
        "actor.backend=fsdp does not have this optimizer",
        "optimizer@prepare.warm_start.optimizer=sgd or backend@actor.backend=engine",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        "actor.backend.micro_batch_tokens_per_rank=20",
        "actor.backend.micro_batch_tokens_per_rank",
        "a row may have 24 tokens (data.max_prompt_tokens + rollout.max_response_tokens)",
        "nearest value that works is 24",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        "model.path=/m data.train_path=t data.validation_path=v sft.max_tokens=9000 backend.micro_batch_tokens_per_rank=8192",
        "actor.backend.micro_batch_tokens_per_rank",
        "9000 tokens (sft.max_tokens)",
        "9000",
        "sft",
    ),
    Case(
        "mini_batches_divide_the_rows",
        "actor.mini_batch_size=100",
        "actor.mini_batch_size",
        "must divide the 256 rows of a step, data.prompts_per_step=32 x rollout.group_size=8",
        "64 or 128",
    ),
    Case(
        "shared_processes_have_equal_ranks",
        "critic.num_ranks=2",
        "critic.num_ranks",
        "share a process per rank, and actor.num_ranks=1",
        "critic.num_ranks=1, actor.num_ranks=2, placement=separate",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo critic.optimizer.lr=0.1",
        "critic.optimizer.lr",
        "algorithm=grpo makes no critic",
        "Leave it out",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo backend@critic.backend=fsdp",
        "critic.backend",
        "algorithm=grpo makes no critic",
        "Leave it out",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm=grpo algorithm.critic_warmup_steps=3",
        "algorithm.critic_warmup_steps",
        "makes no critic",
        "algorithm=ppo",
    ),
    Case(
        "critic_settings_are_used",
        "algorithm.critic_warmup_steps=200",
        "algorithm.critic_warmup_steps",
        "the actor would never learn",
        "at most 199",
    ),
    Case(
        "reference_settings_are_used",
        "algorithm=dr_grpo reference.num_ranks=1",
        "reference.num_ranks",
        "algorithm.kl.place=none makes no reference",
        "Leave it out",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} preference.max_tokens=5000 backend.micro_batch_tokens_per_rank=8192",
        "reward.backend.micro_batch_tokens_per_rank",
        "10000 tokens (2 x preference.max_tokens: rows that are compared stay together)",
        "10000",
        "reward_model",
    ),
    Case(
        "divergence_of_a_file_is_read",
        f"{' '.join(INPUTS)} sft.divergence=forward sft.beta=0.5",
        "sft.beta",
        "sft.divergence=forward does not use it",
        "Set it to null, or sft.divergence=jsd",
        "sft",
    ),
    Case(
        "divergence_of_a_file_is_read",
        f"{' '.join(INPUTS)} sft.divergence=forward data.special_tokens=escape",
        "data.special_tokens",
        "learns tokens as they were sampled",
        "Leave it out",
        "sft",
    ),
    Case(
        "divergence_of_a_file_is_read",
        f"{' '.join(INPUTS)} sft.top_k=4",
        "sft.top_k",
        "sft.divergence=null does not use it",
        "Leave it out",
        "sft",
    ),
    Case(
        "loss_settings_are_read",
        f"{' '.join(INPUTS)} preference.gamma=1.0",
        "preference.gamma",
        "preference.loss=sigmoid does not use it",
        "Set it to null, or preference.loss=simpo",
        "dpo",
    ),
    Case(
        "loss_settings_are_read",
        f"{' '.join(INPUTS)} preference.desirable_weight=2",
        "preference.desirable_weight",
        "preference.loss=sigmoid does not use it",
        "Set it to null, or preference.loss=kto or preference.loss=apo_zero_unpaired",
        "dpo",
    ),
    Case(
        "single_responses_suffice",
        f"{' '.join(INPUTS)} preference.loss=apo_zero_unpaired preference.rpo_alpha=1",
        "preference.rpo_alpha",
        "preference.loss=apo_zero_unpaired has no chosen response of a pair",
        "take a loss of pairs",
        "dpo",
    ),
    Case(
        "single_responses_suffice",
        f"{' '.join(INPUTS)} preference.loss=kto preference.batch_size=1",
        "preference.batch_size",
        "on each prompt with the response to another one",
        "Set it to 2 or more",
        "dpo",
    ),
    Case(
        "reference_settings_are_used",
        f"{' '.join(INPUTS)} preference.loss=orpo reference.model.path=/other",
        "reference.model.path",
        "preference.loss=orpo has no reference",
        "Leave it out",
        "dpo",
    ),
    Case(
        "reference_settings_are_used",
        f"{' '.join(INPUTS)} actor.lora.rank=4 backend@reference.backend=fsdp",
        "reference.backend",
        "with actor.lora.rank=4 the reference is the actor without its adapter",
        "Leave it out",
        "dpo",
    ),
    Case(
        "offloading_frees_shared_devices",
        "placement=separate placement.offload=optimizer",
        "placement.offload",
        "with placement=separate trainers share their devices with no rollout engine",
        "use placement=colocated",
    ),
    Case(
        "ranks_fit_the_backend",
        "backend=fsdp actor.num_ranks=6 actor.backend.sequence_parallel=4",
        "actor.backend.sequence_parallel",
        "actor.num_ranks=6 ranks are cut into groups of this size",
        "Use 1, 2, 3 or 6.",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} backend=fsdp backend.micro_batch_tokens_per_rank=700 backend.sequence_parallel=2 "
        "actor.num_ranks=2",
        "actor.backend.micro_batch_tokens_per_rank",
        "1536 tokens (data.max_prompt_tokens + rollout.max_response_tokens) and must fit into one micro-batch, which 2",
        "The nearest value that works is 768",
        "ppo",
    ),
    Case(
        # Tensor- and pipeline-parallel ranks hold whole rows
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} backend=megatron backend.micro_batch_tokens_per_rank=700 backend.context_parallel=2 "
        "actor.backend.tensor_parallel=2 actor.num_ranks=4",
        "actor.backend.micro_batch_tokens_per_rank",
        "must fit into one micro-batch, which 2 ranks share",
        "The nearest value that works is 768",
        "ppo",
    ),
    Case(
        "micro_batch_holds_the_longest_row",
        f"{' '.join(INPUTS)} backend=megatron backend.micro_batch_tokens_per_rank=700 backend.tensor_parallel=2 "
        "actor.num_ranks=2",
        "actor.backend.micro_batch_tokens_per_rank",
        "must fit into one micro-batch",
        "The nearest value that works is 1536",
        "ppo",
    ),
    Case(
        "ranks_fit_the_backend",
        "backend=fsdp backend.sharding=hybrid actor.num_ranks=8 backend.shard_size=3",
        "actor.backend.shard_size",
        "actor.num_ranks=8 ranks are cut into groups of this size",
        "Use 2 or 4.",
    ),
    Case(
        "ranks_fit_the_backend",
        "backend=fsdp backend.sharding=hybrid backend.shard_size=2 actor.num_ranks=3",
        "actor.backend.sharding",
        "cannot be cut into equal groups",
        "such as 4",
    ),
    Case(
        "ranks_fit_the_backend",
        "backend=fsdp backend.shard_size=2",
        "critic.backend.shard_size",
        "critic.backend.sharding=full has no groups",
        "Set it to null",
    ),
    Case(
        "frozen_models_do_not_learn",
        "reference.backend.activation_checkpointing=true",
        "reference.backend.activation_checkpointing",
        "does not learn",
        "Leave it out",
    ),
    Case(
        "frozen_models_do_not_learn",
        "backend=megatron reference.backend.recompute=full",
        "reference.backend.recompute",
        "does not learn",
        "Leave it out",
    ),
]


def test_ranks_may_differ_where_no_process_is_shared() -> None:
    compose("quickstart", ["critic.num_ranks=2", "placement=separate"])
    compose("quickstart", ["critic.num_ranks=2", "backend@critic.backend=fsdp"])
    compose("quickstart", ["algorithm=grpo", "actor.num_ranks=2"])
