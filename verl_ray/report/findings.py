"""Findings: what a practitioner would point at in the record of a run.

`RULES` is the table of all of them, with every threshold in this file; `evidence.py`
has what they compute with. The table begins with the causes for which nothing is
learned. The live warning reads these after each step (`learns_nothing`); the others
look at a whole run.

Invariant: a pure function of recorded lines, the configuration, and the processes of
the run and their faults. The causes look at single steps. The other rules look at
medians over several steps and, where the size of a metric depends on the task, compare
a run with its own beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from verl_ray.agents.contract import LIMITS, End
from verl_ray.report.evidence import (
    HIGHEST,
    WINDOW,
    ZERO_STD,
    Evidence,
    Finding,
    Rule,
    Severity,
    decline_of,
    episode_ends,
    epoch_per_step,
    evidence_above,
    evidence_of,
    evidence_where,
    failed_scores,
    few_examples,
    findings_of,
    graders_key,
    has_no_spread,
    has_same_scores,
    held_out_scales,
    long_phases,
    lowest_score,
    mean_until,
    medians_above,
    needs_group,
    restarts,
    steps_in_a_row,
    supervised_losses,
)
from verl_ray.report.lines import Line, RunLines
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.history import RunSegment


def findings(
    lines: Sequence[Line],
    config: Mapping[str, object],
    history: Sequence[RunSegment] = (),
    faults: Sequence[Mapping[str, object]] = (),
) -> list[Finding]:
    """Return what the record of a run shows, the worst first.

    Args:
        lines: Lines of metrics.jsonl, in the order of their steps.
        config: The configuration of the run as a tree of plain values.
        history: The processes of the run, in order.
        faults: Lines of faults.jsonl, in order.
    """
    run = RunLines(lines, config, history, faults)
    shown: list[Finding] = []
    for rule in RULES:
        # A cause for which nothing is learned says the same, and more.
        if rule.unless.isdisjoint(finding.kind for finding in shown):
            shown += findings_of(run, rule)

    order: list[Severity] = ["critical", "warning", "note"]
    return sorted(shown, key=lambda finding: order.index(finding.severity))


def learns_nothing(
    lines: Sequence[Line], config: Mapping[str, object]
) -> list[Finding]:
    """Return why the run learns nothing, and which scores failed.

    A cause counts where it holds in three steps in a row, or in every step of a shorter
    run. What the data alone decide counts from the first step.

    Args:
        lines: Lines of metrics.jsonl, in the order of their steps.
        config: The configuration of the run as a tree of plain values.
    """
    run = RunLines(lines, config)
    return [finding for cause in CAUSES for finding in findings_of(run, cause)]


# ------------------------------------------------------------ a run that learns nothing

PATIENCE = 3
"""Steps in a row after which a run that learns nothing says so."""
MOSTLY_CUT = 0.9
"""Share of the responses that are cut, from which on a run says so."""

FAILED_SCORES = "failed_scores"
"""Kind of a finding that does not mean that nothing is learned."""

_CUT = "response_length/clip_ratio"


def _mostly_cut(run: RunLines) -> Iterator[Evidence | None]:
    lines = steps_in_a_row(run, PATIENCE, lambda line: line.get(_CUT, 0) >= MOSTLY_CUT)
    seen = (
        f"{MOSTLY_CUT:.0%} of the responses or more were cut at the length limit, and"
        " did not end with an answer"
    )
    worst = max((line[_CUT] for line in lines), default=math.nan)
    yield evidence_of(lines, seen, _CUT, worst, MOSTLY_CUT)


def _same_scores(run: RunLines) -> Iterator[Evidence | None]:
    if run.at("task") != "rl":
        return
    lines = steps_in_a_row(run, PATIENCE, has_same_scores)
    score = lines[-1][HIGHEST] if lines else math.nan
    seen = (
        "all scores are equal, so nothing sets a good response apart from a bad one;"
        f" the last ones were {score:g}"
    )
    yield evidence_of(lines, seen, HIGHEST, score, score, setting=graders_key(run))


def _no_spread(run: RunLines) -> Iterator[Evidence | None]:
    if run.at("task") != "rl":
        return
    # Where all scores are equal, this follows.
    lines = steps_in_a_row(
        run,
        PATIENCE,
        lambda line: has_no_spread(run, line) and not has_same_scores(line),
    )
    seen = (
        "no group had any spread: all responses to a prompt got the same score, so"
        " every advantage is 0"
    )
    yield evidence_of(lines, seen, ZERO_STD, 1.0, 1.0)


def _has_zero_gradient(run: RunLines, metric: str, line: Line) -> bool:
    """Whether the norm of a gradient is 0, and scores do not explain it."""
    is_explained = run.at("task") == "rl" and (
        has_same_scores(line) or has_no_spread(run, line)
    )
    return line.get(metric) == 0 and not is_explained


def _zero_gradient(run: RunLines) -> Iterator[Evidence | None]:
    is_rl = run.at("task") == "rl"
    for metric in run.metrics(r"[a-z]\w*/grad_norm"):
        lines = steps_in_a_row(run, PATIENCE, partial(_has_zero_gradient, run, metric))
        role = metric.partition("/")[0]
        seen = (
            f"the gradient of the {role} was exactly 0, so it does not change: no token"
            " had a loss that depends on it"
        )
        setting = graders_key(run) if is_rl else "data.train_path"
        if is_rl and role == "actor":
            setting = "algorithm.correction.form"
        yield evidence_of(lines, seen, metric, 0.0, 0.0, setting=setting, role=role)


# ------------------------------------------------------------------ reward and policy

SCORE = "critic/score/mean"
ENTROPY = "actor/entropy_per_token"
RESPONSE_LENGTH = "response_length/mean"
TEACHER_KL = "distill/kl"
CHOSEN_LOG_PROB = "logps/chosen"

COLLAPSED = 0.5
EXHAUSTED = 0.1
CERTAIN = 0.01
"""Entropy in nats per token below which a policy is certain."""
SOLVED = 0.9
FAR_FROM_REFERENCE = 1.0
FARTHER = 1.5
CHOSEN_LOST = 5.0
"""In nats: the response is e^5 = 150 times less probable."""
LARGE_UPDATE = 0.1
DOUBLED = 2.0
OFTEN_CUT = 0.3
MOSTLY_EQUAL = 0.8
MISMATCH = 0.05
NOISE = 4.0
"""Multiples of the noise of single steps that a change has to exceed."""


def _reward_collapse(run: RunLines) -> Iterator[Evidence | None]:
    scores = run.series(SCORE)
    medians = scores.medians(WINDOW)
    if not len(medians):
        return
    # A policy may break in its second step, so the first one counts by itself.
    earlier = np.append(scores.values[0], medians.values[:-1])
    best = np.maximum.accumulate(earlier)

    lowest = lowest_score(run)
    limit = lowest + COLLAPSED * (best - lowest)
    falls = best - medians.values > NOISE * scores.noise
    holds = falls & (medians.values < limit)
    if holds.any():
        threshold = float(limit[holds][0])
        yield evidence_where(medians, holds, SCORE, threshold, below=True)


def _entropy_collapse(run: RunLines) -> Iterator[Evidence | None]:
    entropy = run.series(ENTROPY)
    scores = run.series(SCORE)
    smooth = scores.medians(WINDOW)
    medians = entropy.medians(WINDOW)
    if not len(medians) or not len(smooth):
        return
    first = max(entropy.values[0], medians.values[0])
    # Who is certain from the beginning has no entropy to lose.
    if first < CERTAIN:
        return
    threshold = EXHAUSTED * first

    # Who has solved all problems may be certain.
    lowest = lowest_score(run)
    highest = run.series(HIGHEST).values.max(initial=lowest)
    score = np.interp(medians.steps, smooth.steps, smooth.values)
    is_solved = score >= lowest + SOLVED * max(highest - lowest, 1e-9)
    holds = (medians.values < threshold) & ~is_solved
    yield evidence_where(medians, holds, ENTROPY, threshold, below=True)


def _kl_runaway(run: RunLines) -> Iterator[Evidence | None]:
    yield evidence_above(run, "actor/reward_kl_penalty", FAR_FROM_REFERENCE)
    # Sums over tokens would grow with the length of the responses.
    if str(run.at("algorithm.aggregation")).endswith("token_mean"):
        yield evidence_above(run, "actor/kl_loss", FAR_FROM_REFERENCE)


def _teacher_left(run: RunLines) -> Iterator[Evidence | None]:
    divergence = run.series(TEACHER_KL)
    medians = divergence.medians(WINDOW)
    if len(medians):
        # A policy may break in its second step.
        threshold = FARTHER * float(min(divergence.values[0], medians.values[0]))
        yield evidence_where(medians, medians.values > threshold, TEACHER_KL, threshold)


def _chosen_falls(run: RunLines) -> Iterator[Evidence | None]:
    # This one makes bad responses less probable, and worse ones even less.
    if run.at("task") != "dpo" or run.at("preference.loss") == "apo_down":
        return
    log_probs = run.series(CHOSEN_LOG_PROB)
    medians = log_probs.medians(WINDOW)
    margins = run.series("rewards/margins").medians(WINDOW)
    if not len(medians) or not len(margins):
        return
    first = float(max(log_probs.values[0], medians.values[0]))
    threshold = first - max(CHOSEN_LOST, NOISE * log_probs.noise)
    # A step whose responses all have one label has no margin.
    margin = np.interp(medians.steps, margins.steps, margins.values)
    holds = (medians.values < threshold) & (margin > 0)
    yield evidence_where(medians, holds, CHOSEN_LOG_PROB, threshold, below=True)


def _lengths_exploding(run: RunLines) -> Iterator[Evidence | None]:
    lengths = run.series(RESPONSE_LENGTH).medians(WINDOW)
    scores = run.series(SCORE)
    smooth = scores.medians(WINDOW)
    if not len(lengths) or not len(smooth):
        return
    threshold = DOUBLED * float(lengths.values[0])
    score = np.interp(lengths.steps, smooth.steps, smooth.values)
    pays = score > smooth.values[0] + scores.noise
    holds = (lengths.values > threshold) & ~pays
    yield evidence_where(lengths, holds, RESPONSE_LENGTH, threshold)


def _groups_without_spread(run: RunLines) -> Iterator[Evidence | None]:
    if needs_group(run):
        yield evidence_above(run, ZERO_STD, MOSTLY_EQUAL)


def _mismatch(run: RunLines) -> Iterator[Evidence | None]:
    metric = str(run.at("algorithm.mismatch.metric") or "rollout_corr/k3_kl")
    limit = run.number("algorithm.mismatch.limit", MISMATCH)
    # A run that corrects the mismatch already can lower what makes it.
    setting = "algorithm.correction.form"
    if run.at(setting) not in (None, "none"):
        is_stale = run.number("rollout.staleness", 0) > 0
        setting = "rollout.staleness" if is_stale else "rollout.dtype"
    yield evidence_above(run, metric, limit, setting)


# ---------------------------------------------------------------- held-out data, losses

FALSE_ALARM = 0.025
"""Probability that held-out scores fall so far by chance: 2 standard errors where a
single evaluation came before the last two."""
OVERFITTED = 1.05
RISEN = 1.2
LOST_AGAIN = 0.1
CRITIC_STEPS = 50
CRITIC_WINDOW = 20
CRITIC_SHARE = 0.001
"""Share of the variance of returns that a critic has to explain. One that does not
learn comes to some ten-thousandths above or below 0."""


def _over_optimisation(run: RunLines) -> Iterator[Evidence | None]:
    scores = run.series(SCORE)
    if not len(scores):
        return
    noise = NOISE * scores.noise / math.sqrt(WINDOW)

    for metric, scale in held_out_scales(run).items():
        # The best of many is high by chance, so each has its share of false alarms.
        num_others = max(1, len(run.series(metric, steps_only=False)) - 2)
        tolerance = partial(scale.fall_by_chance, FALSE_ALARM / num_others)
        decline = decline_of(run, metric, tolerance)
        if decline is None:
            continue
        rise = mean_until(scores, decline.last) - mean_until(scores, decline.first)
        if rise > noise:
            yield decline.evidence


def _overfitting(run: RunLines) -> Iterator[Evidence | None]:
    for metric in run.metrics(f"{HELD_OUT}.*loss"):
        decline = decline_of(run, metric, lambda best, _: (OVERFITTED - 1) * abs(best))
        if decline is None:
            continue
        for name in supervised_losses(run):
            losses = run.series(name)
            if mean_until(losses, decline.last) < mean_until(losses, decline.first):
                yield decline.evidence


def _loss_rises(run: RunLines) -> Iterator[Evidence | None]:
    for name in supervised_losses(run):
        losses = run.series(name)
        medians = losses.medians(WINDOW)
        if not len(medians):
            continue
        earlier = np.append(losses.values[0], medians.values[:-1])
        best = np.minimum.accumulate(earlier)
        # Near 0 a loss may double, and nothing is lost.
        matters = LOST_AGAIN * (losses.values[0] - best)
        rise = medians.values - best
        holds = (rise > NOISE * losses.noise) & (rise > matters)
        holds &= medians.values > RISEN * best
        if holds.any():
            threshold = float(RISEN * best[holds][0])
            role = name.partition("/")[0]
            setting = f"{role}.optimizer.lr"
            yield evidence_where(medians, holds, name, threshold, setting=setting)


def _blind_critic(run: RunLines) -> Iterator[Evidence | None]:
    metric = "critic/vf_explained_var"
    medians = run.series(metric).medians(CRITIC_WINDOW)
    holds = (medians.values < CRITIC_SHARE) & (medians.steps >= CRITIC_STEPS)
    # One that explains something by now was only slow.
    if holds[-1:].any():
        yield evidence_where(medians, holds, metric, CRITIC_SHARE, below=True)


def _skipped_updates(run: RunLines) -> Iterator[Evidence | None]:
    for metric in run.metrics(r"[a-z]\w*/skipped_steps"):
        role = metric.partition("/")[0]
        skipped = run.series(metric)
        yield evidence_where(
            skipped, skipped.values > 0, metric, 0.0, setting=f"{role}.optimizer.lr"
        )


# --------------------------------------------------------- episodes, time and machines

MOSTLY_LIMITED = 0.5
OFTEN_FAULTY = 0.1
_FAULTY_ENDS = (End.PARSE_ERROR, End.ENVIRONMENT_FAILED)
MEMORY = 0.9
BEYOND_PLAN = 1.2
"""Ratio of measured to predicted memory above which the prediction was wrong."""
BEYOND_PLAN_GIB = 0.25
"""Excess over this ratio that is still tolerated: the libraries of two machines differ
by more than small models take."""
IDLE = 0.5
BOTH_IDLE = 0.25

PHASES = {
    "gen": (0.9, "rollout.num_replicas"),
    "reward": (0.5, "reward.num_ranks"),
    "old_log_prob": (0.5, "actor.num_ranks"),
    "ref": (0.5, "reference.num_ranks"),
    "values": (0.5, "critic.num_ranks"),
    "update_critic": (0.75, "critic.num_ranks"),
    "update_actor": (0.75, "actor.num_ranks"),
    "update_weights": (0.25, "rollout.sync.transport"),
    "controller": (0.25, "data.prompts_per_step"),
    "save_checkpoint": (0.25, "run.checkpoint_every"),
    "testing": (0.5, "run.evaluate_every"),
}
"""Share of the time of a run above which a phase dominates, and what changes it."""


def _idle_devices(run: RunLines) -> Iterator[Evidence | None]:
    # Without GPUs all processes share the cores, so what is idle wastes none.
    if not run.metrics(r".*/perf/max_memory_reserved_gb"):
        return
    if run.at("placement.kind") == "separate":
        yield evidence_above(run, "perf/trainers_idle", IDLE, "rollout.num_replicas")
        yield evidence_above(run, "perf/rollouts_idle", IDLE, "rollout.num_replicas")
    yield evidence_above(run, "perf/both_idle", BOTH_IDLE, "rollout.schedule")


def _memory_near_limit(run: RunLines) -> Iterator[Evidence | None]:
    host = "data.prompts_per_step"
    pairs = [("perf/cpu_memory_used_gb", "perf/cpu_memory_total_gb", host)]
    for metric in run.metrics(r".*/perf/max_memory_reserved_gb"):
        role = metric.partition("/")[0]
        total = f"{role}/perf/device_memory_gb"
        pairs.append((metric, total, f"{role}.backend.micro_batch_tokens_per_rank"))

    for metric, total, setting in pairs:
        sizes = run.series(total).values
        if len(sizes):
            yield evidence_above(run, metric, MEMORY * float(sizes[-1]), setting)


def is_beyond_plan(measured_gib: float, predicted_gib: float) -> bool:
    """Whether a process held more memory than was predicted; False where one is NaN."""
    return measured_gib > BEYOND_PLAN * predicted_gib + BEYOND_PLAN_GIB


# ------------------------------------------------------------------------- the table

CAUSES = (
    Rule(
        "few_examples",
        "warning",
        "A step takes the same examples several times",
        "the data hold fewer examples than a step takes",
        "copies cost time, and say nothing new",
        "Use more data, or lower {the number of examples of a step}",
        few_examples,
    ),
    Rule(
        "epoch_per_step",
        "warning",
        "Every step is a whole epoch",
        "the data hold as many examples as a step takes",
        "a model that always sees the same examples learns them by heart",
        "Lower {the number of examples of a step}, or use more data",
        epoch_per_step,
    ),
    Rule(
        "mostly_cut",
        "critical",
        "Nearly all responses are cut",
        f"{MOSTLY_CUT:.0%} of the responses or more are cut in {PATIENCE} steps in a"
        " row",
        "a response without its answer scores as a wrong one, and few others remain",
        "Raise {rollout.max_response_tokens}, or use a model that ends its responses",
        _mostly_cut,
    ),
    Rule(
        "same_scores",
        "critical",
        "All scores are equal",
        f"all scores of a step are equal, in {PATIENCE} steps in a row",
        "nothing sets a good response apart from a bad one",
        "Look at the responses and at {what scores}: it may never find the answer, or"
        " always; or choose problems that are neither too hard nor too easy",
        _same_scores,
    ),
    Rule(
        "no_spread",
        "critical",
        "No group has any spread",
        f"in all groups all scores are equal, in {PATIENCE} steps in a row, and"
        " advantages compare the members of a group",
        "every advantage is 0",
        "Raise {rollout.temperature} or {rollout.group_size}, or choose problems that"
        " are neither too hard nor too easy",
        _no_spread,
    ),
    Rule(
        "zero_gradient",
        "critical",
        "A model does not change",
        f"the norm of a gradient is exactly 0 in {PATIENCE} steps in a row, and scores"
        " do not explain it",
        "terms that differ do not add up to 0 to the last bit",
        "Look at {what decides its loss}",
        _zero_gradient,
    ),
    Rule(
        FAILED_SCORES,
        "warning",
        "Graders fail",
        "a score failed",
        "its response is not learned from",
        "Look at the logs and at {what scores}",
        failed_scores,
    ),
)
"""Why nothing is learned, and the failed scores."""

RULES = (
    *CAUSES,
    Rule(
        "reward_collapse",
        "critical",
        "The reward collapses",
        f"less than {COLLAPSED:.0%} remains of the best score so far, counted from the"
        f" lowest one, and it fell by more than {NOISE:g} times its noise",
        "what was learned, or known before, is lost; batches differ by less",
        "Lower {actor.optimizer.lr}, or raise {algorithm.kl.coefficient}, and begin"
        " again with a checkpoint from before",
        _reward_collapse,
    ),
    Rule(
        "entropy_collapse",
        "warning",
        "The entropy collapses",
        f"less than {EXHAUSTED:.0%} of a first entropy of {CERTAIN:g} nat or more"
        f" remains, and less than {SOLVED:.0%} of the score is reached",
        "rewards are paid for with entropy; without any they stand still"
        " (arXiv:2505.22617)",
        "Raise {algorithm.clip_high} or {algorithm.entropy_coefficient}, or lower"
        " {actor.optimizer.lr}",
        _entropy_collapse,
    ),
    Rule(
        "kl_runaway",
        "warning",
        "The policy runs away from the reference",
        f"the divergence is above {FAR_FROM_REFERENCE:g} nat per token",
        "the reference then finds each token e = 2.7 times less likely; far from it,"
        " scores mean something else (arXiv:2210.10760)",
        "Raise {algorithm.kl.coefficient}, or lower {actor.optimizer.lr}",
        _kl_runaway,
    ),
    Rule(
        "teacher_left",
        "warning",
        "The student moves away from its teacher",
        f"`{TEACHER_KL}` is above {FARTHER:g} times what it began with",
        "the divergence from the teacher is what distillation lowers",
        "Lower {actor.optimizer.lr}, or raise {distill.weight} beside rewards",
        _teacher_left,
    ),
    Rule(
        "chosen_falls",
        "note",
        "Chosen responses become less probable",
        f"`{CHOSEN_LOG_PROB}` fell by more than {CHOSEN_LOST:g} nats and"
        f" {NOISE:g} times its noise, and `rewards/margins` is above 0",
        "a margin also grows where both responses of a pair fall, one faster; what they"
        " lose goes to responses that nobody has compared (arXiv:2410.08847)",
        "Lower {actor.optimizer.lr}; with a loss of pairs, {preference.rpo_alpha} holds"
        " them up",
        _chosen_falls,
    ),
    Rule(
        "large_updates",
        "warning",
        "Updates go too far",
        f"`actor/ppo_kl` is above {LARGE_UPDATE:g} nats",
        "PPO that stops early does so at 0.01 to 0.05 (Spinning Up, `target_kl`)",
        "Lower {actor.optimizer.lr} or {actor.epochs}",
        medians_above("actor/ppo_kl", LARGE_UPDATE),
    ),
    Rule(
        "lengths_exploding",
        "warning",
        "Responses grow, and nothing comes of it",
        f"responses are {DOUBLED:g} times as long as at the beginning, at no better"
        " score",
        "lengths that pay grow with the score; others come from how a loss weighs"
        " lengths (arXiv:2503.20783)",
        "Change {algorithm.aggregation}, or lower {actor.optimizer.lr}",
        _lengths_exploding,
    ),
    Rule(
        "responses_cut",
        "warning",
        "Responses are cut",
        f"more than {OFTEN_CUT:.0%} of the responses are cut at the length limit",
        "a response without its answer scores as a wrong one, so the reward measures"
        " the limit (arXiv:2503.14476, section 3.4)",
        "Raise {rollout.max_response_tokens}",
        medians_above(_CUT, OFTEN_CUT),
        unless=frozenset({"mostly_cut"}),
    ),
    Rule(
        "groups_without_spread",
        "warning",
        "Few groups teach anything",
        f"in more than {MOSTLY_EQUAL:.0%} of the groups all scores are equal, and"
        " advantages compare the members of a group",
        "the gradient comes from the other fifth (arXiv:2503.14476, section 3.2)",
        "Set {algorithm.dynamic_sampling} or a curriculum, or raise"
        " {rollout.group_size}",
        _groups_without_spread,
        unless=frozenset({"no_spread", "same_scores"}),
    ),
    Rule(
        "mismatch",
        "warning",
        "Sampler and trainer drift apart",
        f"`rollout_corr/k3_kl` is above {MISMATCH:g} nats, or the metric of"
        " `algorithm.mismatch` above its limit",
        "a divergence of x²/2 is a typical ratio of exp(x), here 1.37, which is beyond"
        " PPO's clip of 1.2",
        "Look at {what corrects it or, where that is set, at what makes it}",
        _mismatch,
    ),
    Rule(
        "over_optimisation",
        "critical",
        "Training scores rise, held-out ones fall",
        "the last two values of a held-out metric are worse than its best one by more"
        f" than chance explains (at a level of {FALSE_ALARM:.1%}, for its number of"
        " problems and evaluations), and the score in training rose since",
        "what is optimised is no longer what is wanted (arXiv:2210.10760)",
        "Take the best step, look at what earns a reward ({reward.kind}), or raise"
        " {algorithm.kl.coefficient}",
        _over_optimisation,
    ),
    Rule(
        "blind_critic",
        "warning",
        "The critic explains nothing",
        f"from step {CRITIC_STEPS} on the median of `critic/vf_explained_var` over"
        f" {CRITIC_WINDOW} steps is below {CRITIC_SHARE}, and still is",
        "a constant would predict the returns as well",
        "Change {critic.optimizer.lr}, raise {algorithm.critic_warmup_steps}, or choose"
        " an algorithm without a critic",
        _blind_critic,
    ),
    Rule(
        "skipped_updates",
        "warning",
        "Gradients are not finite",
        "an optimizer step was skipped",
        "one may come from its batch, several come from the model",
        "Lower {the learning rate of this model}",
        _skipped_updates,
    ),
    Rule(
        "loss_rises",
        "critical",
        "The loss rises",
        f"the loss in training is above {RISEN:g} times its lowest median, and above"
        f" that by more than {NOISE:g} times its noise and {LOST_AGAIN:.0%} of what it"
        " had fallen",
        "what is learned from data only falls, but for noise",
        "Lower {the learning rate of this model}",
        _loss_rises,
    ),
    Rule(
        "overfitting",
        "warning",
        "Held-out loss rises, training loss falls",
        "the last two evaluations are worse than the best one by"
        f" {OVERFITTED - 1:.0%}, and the loss in training fell since",
        "the model learns its examples by heart",
        "Take the best step, use more data, or lower {run.total_steps}",
        _overfitting,
    ),
    Rule(
        "episode_limits",
        "warning",
        "Limits end most episodes",
        f"limits end more than {MOSTLY_LIMITED:.0%} of the episodes",
        "the reward then measures the limits",
        "Raise {the setting of this limit}",
        lambda run: episode_ends(run, sorted(LIMITS), MOSTLY_LIMITED),
    ),
    Rule(
        "episode_faults",
        "warning",
        "Faults end episodes",
        f"failed environments and calls that cannot be parsed end more than"
        f" {OFTEN_FAULTY:.0%} of the episodes",
        "a run that only scores responses stops at this share of failures, too"
        " (`reward.max_failed_fraction`)",
        "Look at the logs and at {the setting of this fault}",
        lambda run: episode_ends(run, _FAULTY_ENDS, OFTEN_FAULTY),
    ),
    Rule(
        "phase_dominates",
        "note",
        "A phase takes most of the time",
        "a phase takes more of the time than "
        + ", ".join(f"`{name}` {share:.0%}" for name, (share, _) in PHASES.items())
        + "; steps in which a replica was started again do not count",
        "generation is most of a step as a rule (arXiv:2405.11143), nothing else is",
        "Look at {the setting of this phase}",
        lambda run: long_phases(run, PHASES),
    ),
    Rule(
        "idle_devices",
        "note",
        "Devices are idle",
        f"trainers or engines with devices of their own are idle for more than"
        f" {IDLE:.0%} of the time, or both at once for more than {BOTH_IDLE:.0%}",
        "half of these devices would do, or a schedule in which the two overlap",
        "Change {the schedule or the number of replicas}",
        _idle_devices,
    ),
    Rule(
        "memory_near_limit",
        "warning",
        "Memory is nearly full",
        f"more than {MEMORY:.0%} of a device, or of the memory of the driver's host, is"
        " in use",
        "Ray ends processes at 95 % of a host, and an allocator that is full frees and"
        " allocates again and again",
        "Lower {the setting of this memory}",
        _memory_near_limit,
    ),
    Rule(
        "restarts",
        "warning",
        "Processes were lost",
        "the driver failed or was killed, or a worker or a replica was started again",
        "each costs its start and the steps since the last state",
        "Read `history.jsonl` and `faults.jsonl`; the limit is"
        " {run.recovery.max_restarts}",
        restarts,
    ),
)
"""Every rule: why nothing is learned, how the policy changes, what time goes into."""
