"""Settings of the algorithms of other systems, each with what does the same here.

Invariant: that of `foreign.py`. Deliberately not here: any other settings.
"""

from __future__ import annotations

_CLIP = "Here they are two: algorithm.clip_low and algorithm.clip_high."
_VALUE = "With a critic (algorithm=ppo) it is {key}; other algorithms have none."
_STD = (
    "algorithm=grpo divides by the deviation of the group, algorithm=dr_grpo does not."
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
        "Write algorithm.kl.place=loss for true, algorithm.kl.place=none for false.",
        "use_kl_loss",
    ),
    (
        "Write algorithm.kl.place=reward for true, algorithm.kl.place=none for false.",
        "use_kl_in_reward",
    ),
    (
        "Here it is algorithm.kl.coefficient; without any, algorithm.kl.place=none.",
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
    ("algorithm.clip_high", "clip_ratio_high ratio_clip_max epsilon_high"),
    ("algorithm.dual_clip", "clip_ratio_c ratio_clip_c delta"),
    (_VALUE.format(key="algorithm.value_loss.clip"), "cliprange_value value_clip"),
    ("Nothing to set: the critic has an optimizer of its own.", "vf_coef value_coef"),
    ("algorithm.entropy_coefficient", "entropy_coeff entropy_coef ent_coef"),
    ("algorithm.entropy_coefficient", "entropy_loss_coef"),
    (
        "algorithm.aggregation is token_mean (token-mean, dapo), seq_mean_token_mean"
        " (grpo), seq_mean_token_sum, or seq_mean_token_sum_norm (dr_grpo).",
        "loss_agg_mode loss_type token_level_loss",
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
