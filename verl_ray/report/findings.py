"""Findings: what a practitioner would point at in the record of a run.

`RULES` is the table of all of them. It begins with the causes for which nothing is
learned (`causes.py`); the others look at a whole run.

Invariant: a pure function of recorded lines, the configuration, and the processes of
the run and their faults. A rule looks at medians over several steps and, where the size
of a metric depends on the task, compares a run with its own beginning.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np

from verl_ray.agents.contract import LIMITS, End
from verl_ray.report.causes import (
    CAUSES,
    CUT,
    WINDOW,
    ZERO_STD,
    Evidence,
    Finding,
    Line,
    Rule,
    RunLines,
    Series,
    Severity,
    evidence_above,
    evidence_where,
    findings_of,
    needs_group,
)
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.comparison import is_lower_better
from verl_ray.tracking.history import HISTORY, Stint


def findings(
    lines: Sequence[Line],
    config: Mapping[str, object],
    history: Sequence[Stint] = (),
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


# ------------------------------------------------------------------ reward and policy

SCORE = "critic/score/mean"
ENTROPY = "actor/entropy_per_token"
RESPONSE_LENGTH = "response_length/mean"

COLLAPSED = 0.5
EXHAUSTED = 0.1
SOLVED = 0.9
FAR_FROM_REFERENCE = 1.0
LARGE_UPDATE = 0.1
DOUBLED = 2.0
OFTEN_CUT = 0.3
MOSTLY_EQUAL = 0.8
MISMATCH = 0.05
NOISE = 4.0
"""Multiples of the noise of single steps that a change has to exceed."""


def _lowest(run: RunLines) -> float:
    """Return the score of the worst responses, the median over steps."""
    values = run.series("critic/score/min").values
    return float(np.median(values)) if len(values) else math.nan


def _reward_collapse(run: RunLines) -> Iterator[Evidence | None]:
    scores = run.series(SCORE)
    medians = scores.medians(WINDOW)
    if not len(medians):
        return
    # A policy may break in its second step, so the first one counts by itself.
    earlier = np.append(scores.values[0], medians.values[:-1])
    best = np.maximum.accumulate(earlier)

    lowest = _lowest(run)
    limit = lowest + COLLAPSED * (best - lowest)
    falls = best - medians.values > NOISE * scores.noise(WINDOW)
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
    threshold = EXHAUSTED * max(entropy.values[0], medians.values[0])

    # Who has solved all problems may be certain.
    lowest = _lowest(run)
    highest = run.series("critic/score/max").values.max(initial=lowest)
    score = np.interp(medians.steps, smooth.steps, smooth.values)
    is_solved = score >= lowest + SOLVED * max(highest - lowest, 1e-9)
    holds = (medians.values < threshold) & ~is_solved
    yield evidence_where(medians, holds, ENTROPY, threshold, below=True)


def _kl_runaway(run: RunLines) -> Iterator[Evidence | None]:
    yield evidence_above(run, "actor/reward_kl_penalty", FAR_FROM_REFERENCE)
    # Sums over tokens would grow with the length of the responses.
    if str(run.at("algorithm.aggregation")).endswith("token_mean"):
        yield evidence_above(run, "actor/kl_loss", FAR_FROM_REFERENCE)


def _large_updates(run: RunLines) -> Iterator[Evidence | None]:
    yield evidence_above(run, "actor/ppo_kl", LARGE_UPDATE)


def _lengths_exploding(run: RunLines) -> Iterator[Evidence | None]:
    lengths = run.series(RESPONSE_LENGTH).medians(WINDOW)
    scores = run.series(SCORE)
    smooth = scores.medians(WINDOW)
    if not len(lengths) or not len(smooth):
        return
    threshold = DOUBLED * float(lengths.values[0])
    score = np.interp(lengths.steps, smooth.steps, smooth.values)
    pays = score > smooth.values[0] + scores.noise(WINDOW)
    holds = (lengths.values > threshold) & ~pays
    yield evidence_where(lengths, holds, RESPONSE_LENGTH, threshold)


def _responses_cut(run: RunLines) -> Iterator[Evidence | None]:
    yield evidence_above(run, CUT, OFTEN_CUT)


def _groups_without_spread(run: RunLines) -> Iterator[Evidence | None]:
    if needs_group(run):
        yield evidence_above(run, ZERO_STD, MOSTLY_EQUAL)


def _mismatch(run: RunLines) -> Iterator[Evidence | None]:
    metric = str(run.at("algorithm.mismatch.metric") or "rollout_corr/k3_kl")
    yield evidence_above(run, metric, run.number("algorithm.mismatch.limit", MISMATCH))


# ---------------------------------------------------------------- held-out data, losses

FALSE_ALARM = 0.025
"""Probability that held-out scores fall so far by chance: 2 standard errors where a
single evaluation came before the last two."""
OVERFITTED = 1.05
RISEN = 1.2
LOST_AGAIN = 0.1
CRITIC_STEPS = 50
CRITIC_WINDOW = 20


def _around(series: Series, step: int) -> float:
    """Return the mean over the five steps that end at a step.

    The first step is of the model before the training, which is that of step 0.
    """
    count = max(1, int(np.searchsorted(series.steps, step, side="right")))
    return float(np.mean(series.values[:count][-WINDOW:]))


def _past_the_best(
    run: RunLines, metric: str, tolerance: Callable[[float, float], float]
) -> tuple[Series, float] | None:
    """Return the evaluations after the best one, if the last two are worse.

    Args:
        run: The record.
        metric: A held-out metric.
        tolerance: How much worse counts, from the best value and the last ones' mean.

    Returns:
        The best evaluation and those after it, and the value from which on they count
        as worse; None if the last two do not.
    """
    evaluations = run.series(metric, of_steps=False)
    sign = -1.0 if is_lower_better(metric) else 1.0
    if len(evaluations) < 3:
        return None
    best = int(np.argmax(sign * evaluations.values))
    after = evaluations.values[best + 1 :]
    if len(after) < 2:
        return None

    limit = float(evaluations.values[best])
    limit -= sign * tolerance(limit, float(after[-2:].mean()))
    if not (sign * after[-2:] < sign * limit).all():
        return None
    return Series(evaluations.steps[best:], evaluations.values[best:]), limit


def _over_optimisation(run: RunLines) -> Iterator[Evidence | None]:
    scores = run.series(SCORE)
    if not len(scores):
        return
    noise = NOISE * scores.noise(WINDOW) / math.sqrt(WINDOW)

    for metric, num_problems in _accuracies(run).items():
        num_others = len(run.series(metric, of_steps=False)) - 2
        tolerance = partial(_chance, num_problems, max(1, num_others))
        worse = _past_the_best(run, metric, tolerance)
        if worse is None:
            continue
        after, limit = worse
        first, last = int(after.steps[0]), int(after.steps[-1])
        if _around(scores, last) > _around(scores, first) + noise:
            holds = (np.arange(len(after)) > 0) & (after.values < limit)
            yield evidence_where(after, holds, metric, limit, below=True)


def _chance(num_problems: float, num_others: int, best: float, last: float) -> float:
    """Return how far an accuracy falls by chance, from the best of several others."""
    mean = (best + last) / 2
    # No values between 0 and 1 vary more than those that are 0 or 1.
    error = math.sqrt(2 * mean * (1 - mean) / num_problems)
    # The best of many is high by chance, so each of them has its share of false alarms.
    return NormalDist().inv_cdf(1 - FALSE_ALARM / num_others) * error


def _accuracies(run: RunLines) -> dict[str, float]:
    """Return held-out accuracies, with the number of problems of their data source.

    Other rewards may have any scale, so nothing bounds how much they vary.
    """
    names = run.metrics(rf"{HELD_OUT}.+/mean@\d+")
    sources = {name.rsplit("/", 2)[0].removeprefix(HELD_OUT) for name in names}
    accuracies = {}
    for name in names:
        values = run.series(name, of_steps=False).values
        is_share = values.min(initial=0) >= 0 and values.max(initial=1) <= 1
        if not is_share or not re.fullmatch(r".+/acc/mean@\d+", name):
            continue
        source = name.rsplit("/", 2)[0].removeprefix(HELD_OUT)
        counts = run.series(f"val-aux/{source}/num_prompts", of_steps=False).values
        # Records of older versions have the number of all problems alone.
        if not len(counts) and len(sources) == 1:
            counts = run.series("val-aux/num_prompts", of_steps=False).values
        if len(counts) and counts[-1] > 0:
            accuracies[name] = float(counts[-1])
    return accuracies


def _overfitting(run: RunLines) -> Iterator[Evidence | None]:
    for metric in run.metrics(f"{HELD_OUT}.*loss"):
        worse = _past_the_best(run, metric, _overfitted)
        for name in _supervised_losses(run):
            if worse is None:
                continue
            after, limit = worse
            losses = run.series(name)
            first, last = int(after.steps[0]), int(after.steps[-1])
            if _around(losses, last) < _around(losses, first):
                yield evidence_where(after, after.values > limit, metric, limit)


def _overfitted(best: float, _last: float) -> float:
    return (OVERFITTED - 1) * abs(best)


def _supervised_losses(run: RunLines) -> list[str]:
    """Return the metrics of losses that should fall: none in reinforcement learning."""
    if run.at("task") == "rl":
        return []
    return run.metrics(r"[a-z]\w*/loss")[:1]


def _loss_rises(run: RunLines) -> Iterator[Evidence | None]:
    for name in _supervised_losses(run):
        losses = run.series(name)
        medians = losses.medians(WINDOW)
        if not len(medians):
            continue
        earlier = np.append(losses.values[0], medians.values[:-1])
        best = np.minimum.accumulate(earlier)
        # Near 0 a loss may double, and nothing is lost.
        matters = LOST_AGAIN * (losses.values[0] - best)
        rise = medians.values - best
        holds = (rise > NOISE * losses.noise(WINDOW)) & (rise > matters)
        holds &= medians.values > RISEN * best
        if holds.any():
            threshold = float(RISEN * best[holds][0])
            role = name.partition("/")[0]
            setting = f"{role}.optimizer.lr"
            yield evidence_where(medians, holds, name, threshold, setting=setting)


def _blind_critic(run: RunLines) -> Iterator[Evidence | None]:
    metric = "critic/vf_explained_var"
    medians = run.series(metric).medians(CRITIC_WINDOW)
    holds = (medians.values <= 0) & (medians.steps >= CRITIC_STEPS)
    yield evidence_where(medians, holds, metric, 0.0, below=True)


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
FAULTS = (End.PARSE_ERROR, End.ENVIRONMENT_FAILED)
FAULTS_FILE = "faults.jsonl"
RESTORED = ("restart", "go back")
"""What a driver does about a fault without ending itself."""
MEMORY = 0.9
IDLE = 0.5
BOTH_IDLE = 0.25

END_SETTINGS = {
    End.MAX_TURNS: "agent.max_turns",
    End.MAX_TOKENS: "agent.max_tokens",
    End.MAX_TOOL_CALLS: "agent.max_tool_calls",
    End.CONTEXT_OVERFLOW: "rollout.max_response_tokens",
    End.MODEL_TIMEOUT: "agent.model_timeout_s",
    End.TOOL_TIMEOUT: "agent.tool_timeout_s",
    End.TURN_TIMEOUT: "agent.turn_timeout_s",
    End.EPISODE_TIMEOUT: "agent.episode_timeout_s",
    End.PARSE_ERROR: "agent.tool_parser",
    End.ENVIRONMENT_FAILED: "agent.environments",
}
"""The setting that decides how many episodes end so."""

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
BESIDE_STEPS = ("save_checkpoint", "testing")
"""Phases that are no part of timing_s/step."""


def _episode_ends(
    run: RunLines, ends: Sequence[End], threshold: float
) -> Iterator[Evidence | None]:
    """Yield where these ends together have a larger share of the episodes."""
    metrics = {end: f"episode/ends/{end}" for end in ends}
    medians = run.total(list(metrics.values())).medians(WINDOW)
    if not len(medians):
        return
    commonest = max(ends, key=lambda end: float(run.series(metrics[end]).values.sum()))
    metric = metrics[commonest]
    setting = END_SETTINGS[commonest]
    evidence = evidence_where(
        medians, medians.values > threshold, metric, threshold, setting=setting
    )
    if evidence is not None:
        seen = (
            f"of the episodes {evidence.value:.0%} ended so in five steps, most of them"
            f" with {commonest}"
        )
        yield replace(evidence, seen=seen)


def _phase_dominates(run: RunLines) -> Iterator[Evidence | None]:
    step_s = run.series("timing_s/step")
    # What learns from data has one phase.
    if len(step_s) < 2 * WINDOW or run.at("task") != "rl":
        return
    times = {name: run.series(f"timing_s/{name}") for name in PHASES}
    seconds = {name: float(spent.values.sum()) for name, spent in times.items()}
    total_s = float(step_s.values.sum()) + sum(seconds[name] for name in BESIDE_STEPS)
    for name, (share, setting) in PHASES.items():
        if seconds[name] > share * total_s:
            metric = f"timing_s/{name}"
            seen = (
                f"{metric} takes {seconds[name] / total_s:.0%} of the time, more than"
                f" {share:.0%}"
            )
            steps = times[name].steps
            count, first, last = len(steps), int(steps[0]), int(steps[-1])
            # The metric is in seconds, and so are its mean and what that may be.
            mean_s, most_s = seconds[name] / count, share * total_s / count
            yield Evidence(seen, metric, first, last, count, mean_s, most_s, setting)


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


def _restarts(run: RunLines) -> Iterator[Evidence | None]:
    lost = [stint for stint in run.history if stint.ending in ("failed", "killed")]
    if lost:
        seen = (
            f"{len(lost)} of the {len(run.history)} processes of the run failed or were"
            " killed"
        )
        steps = [stint.last_step or stint.first_step for stint in lost]
        count = len(lost)
        yield Evidence(seen, HISTORY, min(steps), max(steps), count, count, 0)

    yield _restored(run)
    metric = "rollout/restarts"
    restarts = run.series(metric)
    yield evidence_where(restarts, restarts.values > 0, metric, 0.0)


def _restored(run: RunLines) -> Evidence | None:
    """Return how many processes were lost and came back while the driver went on."""
    roles: Counter[str] = Counter()
    steps = []
    for fault in run.faults:
        step = fault.get("step")
        if fault.get("cure") in RESTORED and isinstance(step, int):
            roles[f"{fault.get('role')} {fault.get('kind')}"] += 1
            steps.append(step)
    if not steps:
        return None

    count = len(steps)
    parts = ", ".join(f"{what} {number}" for what, number in roles.items())
    seen = f"processes were lost and started again: {parts}"
    return Evidence(seen, FAULTS_FILE, min(steps), max(steps), count, count, 0)


# ------------------------------------------------------------------------- the table

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
        f"less than {EXHAUSTED:.0%} of the first entropy remains, and less than"
        f" {SOLVED:.0%} of the score is reached",
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
        "large_updates",
        "warning",
        "Updates go too far",
        f"`actor/ppo_kl` is above {LARGE_UPDATE:g} nats",
        "PPO that stops early does so at 0.01 to 0.05 (Spinning Up, `target_kl`)",
        "Lower {actor.optimizer.lr} or {actor.epochs}",
        _large_updates,
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
        _responses_cut,
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
        "Set {algorithm.correction.form}, or lower {rollout.staleness}",
        _mismatch,
    ),
    Rule(
        "over_optimisation",
        "critical",
        "Training scores rise, held-out ones fall",
        "the last two accuracies of a data source are below its best one by more than"
        f" chance explains (at a level of {FALSE_ALARM:.1%}, for its number of problems"
        " and evaluations), and the score in training rose since",
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
        f" {CRITIC_WINDOW} steps is 0 or less",
        "a constant would predict the returns as well",
        "Change {critic.optimizer.lr}, set {algorithm.critic_warmup_steps}, or choose"
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
        lambda run: _episode_ends(run, sorted(LIMITS), MOSTLY_LIMITED),
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
        lambda run: _episode_ends(run, FAULTS, OFTEN_FAULTY),
    ),
    Rule(
        "phase_dominates",
        "note",
        "A phase takes most of the time",
        "a phase takes more of the time than "
        + ", ".join(f"`{name}` {share:.0%}" for name, (share, _) in PHASES.items()),
        "generation is most of a step as a rule (arXiv:2405.11143), nothing else is",
        "Look at {the setting of this phase}",
        _phase_dominates,
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
        "Read `faults.jsonl`; the limit is {run.recovery.max_restarts}",
        _restarts,
    ),
)
"""Every rule: why nothing is learned, how the policy changes, what time goes into."""
