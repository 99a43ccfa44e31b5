"""Findings: what a practitioner would point at in the record of a run.

`findings` is the one place that knows them: the causes for which nothing is learned
(`causes.py`), and the rules of `RULES`, which look at a whole run.

Invariant: a pure function of recorded lines, the configuration and the history of the
processes. A rule looks at medians over several steps and, where the size of a metric
depends on the task, compares a run with its own beginning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from verl_ray.agents.contract import LIMITS, End
from verl_ray.report.causes import (
    CUT,
    ZERO_STD,
    Finding,
    Line,
    RunLines,
    Series,
    Severity,
    learns_nothing,
    needs_group,
)
from verl_ray.tracking.base import HELD_OUT
from verl_ray.tracking.comparison import is_lower_better
from verl_ray.tracking.history import HISTORY, Stint


def findings(
    lines: Sequence[Line], config: Mapping[str, object], history: Sequence[Stint] = ()
) -> list[Finding]:
    """Return what the record of a run shows, the worst first.

    Args:
        lines: Lines of metrics.jsonl, in the order of their steps.
        config: The configuration of the run as a tree of plain values.
        history: The processes of the run, in order.
    """
    run = RunLines(lines, config, history)
    causes = learns_nothing(lines, config)
    kinds = {cause.kind for cause in causes}

    seen = list(causes)
    for rule in RULES:
        # A cause for which nothing is learned says the same, and more.
        if rule.unless in kinds:
            continue
        seen += [
            _finding(run, rule, evidence) for evidence in rule.test(run) if evidence
        ]

    order: list[Severity] = ["critical", "warning", "note"]
    return sorted(seen, key=lambda finding: order.index(finding.severity))


# ------------------------------------------------------------------ parts of the rules

WINDOW = 5
"""Steps over which medians are taken, so that no single step is a finding."""


@dataclass(frozen=True)
class _Evidence:
    """The steps in which a rule holds, and its worst value there."""

    seen: str
    """What was seen, in words."""
    metric: str
    step: int
    last_step: int
    num_steps: int
    value: float
    threshold: float
    setting: str | None = None
    """Key of the setting to change, where it is not that of the rule."""


@dataclass(frozen=True)
class Rule:
    """A row of the table: when something is a finding, and why."""

    kind: str
    severity: Severity
    title: str
    when: str
    """The condition, for the documents."""
    why: str
    """Why the threshold is where it is, with its source."""
    advice: str
    """What to change; a key in braces is replaced by the setting and its value."""
    test: Callable[[RunLines], Iterator[_Evidence | None]]
    unless: str | None = None
    """Kind of the cause that says the same, and more."""

    @property
    def settings(self) -> list[str]:
        """Return the keys that the advice names."""
        return re.findall(r"{(.+?)}", self.advice)


def _finding(run: RunLines, rule: Rule, evidence: _Evidence) -> Finding:
    """Return what a rule says of the steps in which it holds."""
    keys = rule.settings
    if evidence.setting is not None:
        keys = [evidence.setting]
    advice = re.sub(r"{(.+?)}", lambda key: run.in_words(key[1]), rule.advice)
    if not rule.settings:
        advice = advice.format(run.in_words(keys[0]))
    return Finding(
        rule.kind,
        rule.severity,
        rule.title,
        f"{evidence.seen}. {advice}",
        evidence.metric,
        evidence.step,
        evidence.value,
        evidence.threshold,
        keys[0],
        evidence.last_step,
        evidence.num_steps,
    )


def _where(
    series: Series,
    holds: npt.NDArray[np.bool_],
    metric: str,
    threshold: float,
    *,
    below: bool = False,
    setting: str | None = None,
) -> _Evidence | None:
    """Return the steps of medians at which a rule holds; None if there are none."""
    if not holds.any():
        return None
    steps = series.steps[holds]
    values = series.values[holds]
    worst = float(values.min() if below else values.max())
    seen = (
        f"the median of {metric} came to {worst:.3g},"
        f" {'below' if below else 'above'} {threshold:.3g}"
    )
    first, last = int(steps[0]), int(steps[-1])
    return _Evidence(seen, metric, first, last, len(steps), worst, threshold, setting)


def _above(
    run: RunLines, metric: str, threshold: float, setting: str | None = None
) -> _Evidence | None:
    """Return where the median over five steps is above a threshold."""
    medians = run.series(metric).medians(WINDOW)
    holds = medians.values > threshold
    return _where(medians, holds, metric, threshold, setting=setting)


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


def _reward_collapse(run: RunLines) -> Iterator[_Evidence | None]:
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
        yield _where(medians, holds, SCORE, threshold, below=True)


def _entropy_collapse(run: RunLines) -> Iterator[_Evidence | None]:
    entropy = run.series(ENTROPY)
    scores = run.series(SCORE)
    medians = entropy.medians(WINDOW)
    if not len(medians) or not len(scores):
        return
    threshold = EXHAUSTED * max(entropy.values[0], medians.values[0])

    # Who has solved all problems may be certain.
    lowest = _lowest(run)
    highest = run.series("critic/score/max").values.max(initial=lowest)
    smooth = scores.medians(WINDOW)
    score = np.interp(medians.steps, smooth.steps, smooth.values)
    is_solved = score >= lowest + SOLVED * max(highest - lowest, 1e-9)
    holds = (medians.values < threshold) & ~is_solved
    yield _where(medians, holds, ENTROPY, threshold, below=True)


def _kl_runaway(run: RunLines) -> Iterator[_Evidence | None]:
    yield _above(run, "actor/reward_kl_penalty", FAR_FROM_REFERENCE)
    # Sums over tokens would grow with the length of the responses.
    if str(run.at("algorithm.aggregation")).endswith("token_mean"):
        yield _above(run, "actor/kl_loss", FAR_FROM_REFERENCE)


def _large_updates(run: RunLines) -> Iterator[_Evidence | None]:
    yield _above(run, "actor/ppo_kl", LARGE_UPDATE)


def _lengths_exploding(run: RunLines) -> Iterator[_Evidence | None]:
    lengths = run.series(RESPONSE_LENGTH).medians(WINDOW)
    scores = run.series(SCORE)
    smooth = scores.medians(WINDOW)
    if not len(lengths) or not len(smooth):
        return
    threshold = DOUBLED * float(lengths.values[0])
    score = np.interp(lengths.steps, smooth.steps, smooth.values)
    pays = score > smooth.values[0] + scores.noise(WINDOW)
    holds = (lengths.values > threshold) & ~pays
    yield _where(lengths, holds, RESPONSE_LENGTH, threshold)


def _responses_cut(run: RunLines) -> Iterator[_Evidence | None]:
    yield _above(run, CUT, OFTEN_CUT)


def _groups_without_spread(run: RunLines) -> Iterator[_Evidence | None]:
    if needs_group(run):
        yield _above(run, ZERO_STD, MOSTLY_EQUAL)


def _mismatch(run: RunLines) -> Iterator[_Evidence | None]:
    metric = str(run.at("algorithm.mismatch.metric") or "rollout_corr/k3_kl")
    yield _above(run, metric, run.number("algorithm.mismatch.limit", MISMATCH))


# ---------------------------------------------------------------- held-out data, losses

STANDARD_ERRORS = 2.0
OVERFITTED = 1.05
RISEN = 1.2
CRITIC_STEPS = 50
CRITIC_WINDOW = 20


def _around(series: Series, step: int) -> float:
    """Return the mean over the five steps that end at a step, or begin the run."""
    before = series.values[series.steps <= step][-WINDOW:]
    return float(np.mean(before if len(before) else series.values[:WINDOW]))


def _past_the_best(
    run: RunLines, metric: str, tolerance: Callable[[float], float]
) -> tuple[Series, float] | None:
    """Return the evaluations after the best one, if the last two are worse.

    Args:
        run: The record.
        metric: A held-out metric.
        tolerance: From the best value, how much worse counts.

    Returns:
        The best evaluation and those after it, and the value from which on they count
        as worse; None if the last two do not.
    """
    evaluations = run.series(metric, of_steps=False)
    sign = -1.0 if is_lower_better(metric) else 1.0
    if len(evaluations) < 3:
        return None
    best = int(np.argmax(sign * evaluations.values))
    limit = float(evaluations.values[best])
    limit -= sign * tolerance(limit)
    after = evaluations.values[best + 1 :]
    if len(after) < 2 or not (sign * after[-2:] < sign * limit).all():
        return None
    return Series(evaluations.steps[best:], evaluations.values[best:]), limit


def _over_optimisation(run: RunLines) -> Iterator[_Evidence | None]:
    scores = run.series(SCORE)
    num_problems = run.series("val-aux/num_prompts", of_steps=False).values
    if not len(scores) or not len(num_problems):
        return
    noise = NOISE * scores.noise(WINDOW) / math.sqrt(WINDOW)

    for metric in run.metrics(f"{HELD_OUT}.*"):
        values = run.series(metric, of_steps=False).values
        low = min(0.0, values.min(initial=0))
        high = max(1.0, values.max(initial=1))

        def tolerance(best: float, low: float = low, high: float = high) -> float:
            # No distribution between two bounds has a larger variance than this.
            variance = (best - low) * (high - best)
            errors = math.sqrt(2 * variance / num_problems[-1])
            return STANDARD_ERRORS * errors

        worse = _past_the_best(run, metric, tolerance)
        if worse is None or is_lower_better(metric):
            continue
        after, limit = worse
        first, last = int(after.steps[0]), int(after.steps[-1])
        if _around(scores, last) > _around(scores, first) + noise:
            holds = (np.arange(len(after)) > 0) & (after.values < limit)
            yield _where(after, holds, metric, limit, below=True)


def _overfitting(run: RunLines) -> Iterator[_Evidence | None]:
    for metric in run.metrics(f"{HELD_OUT}.*loss"):
        worse = _past_the_best(run, metric, lambda best: (OVERFITTED - 1) * abs(best))
        for name in _supervised_losses(run):
            if worse is None:
                continue
            after, limit = worse
            losses = run.series(name)
            first, last = int(after.steps[0]), int(after.steps[-1])
            if _around(losses, last) < _around(losses, first):
                yield _where(after, after.values > limit, metric, limit)


def _supervised_losses(run: RunLines) -> list[str]:
    """Return the metrics of losses that should fall: none in reinforcement learning."""
    if run.at("task") == "rl":
        return []
    return run.metrics(r"[a-z]\w*/loss")[:1]


def _loss_rises(run: RunLines) -> Iterator[_Evidence | None]:
    for name in _supervised_losses(run):
        losses = run.series(name)
        medians = losses.medians(WINDOW)
        if not len(medians):
            continue
        earlier = np.append(losses.values[0], medians.values[:-1])
        best = np.minimum.accumulate(earlier)
        rises = medians.values - best > NOISE * losses.noise(WINDOW)
        holds = rises & (medians.values > RISEN * best)
        if holds.any():
            threshold = float(RISEN * best[holds][0])
            yield _where(medians, holds, name, threshold)


def _blind_critic(run: RunLines) -> Iterator[_Evidence | None]:
    metric = "critic/vf_explained_var"
    medians = run.series(metric).medians(CRITIC_WINDOW)
    holds = (medians.values <= 0) & (medians.steps >= CRITIC_STEPS)
    yield _where(medians, holds, metric, 0.0, below=True)


def _skipped_updates(run: RunLines) -> Iterator[_Evidence | None]:
    for metric in run.metrics(r"[a-z]\w*/skipped_steps"):
        role = metric.partition("/")[0]
        skipped = run.series(metric)
        yield _where(
            skipped, skipped.values > 0, metric, 0.0, setting=f"{role}.optimizer.lr"
        )


# --------------------------------------------------------- episodes, time and machines

MOSTLY_LIMITED = 0.5
OFTEN_FAULTY = 0.1
FAULTS = (End.PARSE_ERROR, End.ENVIRONMENT_FAILED)
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
) -> Iterator[_Evidence | None]:
    """Yield where these ends together have a larger share of the episodes."""
    shares = {end: run.series(f"episode/ends/{end}") for end in ends}
    shares = {end: series for end, series in shares.items() if len(series)}
    if not shares:
        return
    steps = next(iter(shares.values())).steps
    values = np.sum([series.values for series in shares.values()], axis=0)
    commonest = max(shares, key=lambda end: float(shares[end].values.mean()))
    medians = Series(steps, values).medians(WINDOW)
    metric = f"episode/ends/{commonest}"
    setting = END_SETTINGS[commonest]
    evidence = _where(
        medians, medians.values > threshold, metric, threshold, setting=setting
    )
    if evidence is not None:
        seen = (
            f"of the episodes {evidence.value:.0%} ended so in five steps, most of them"
            f" with {commonest}"
        )
        yield replace(evidence, seen=seen)


def _phase_dominates(run: RunLines) -> Iterator[_Evidence | None]:
    step_s = run.series("timing_s/step")
    # What learns from data has one phase.
    if len(step_s) < 2 * WINDOW or run.at("task") != "rl":
        return
    times = {name: run.series(f"timing_s/{name}") for name in PHASES}
    seconds = {name: float(spent.values.sum()) for name, spent in times.items()}
    total_s = float(step_s.values.sum()) + sum(seconds[name] for name in BESIDE_STEPS)
    for name, (threshold, setting) in PHASES.items():
        spent = times[name]
        share = seconds[name] / total_s
        if share > threshold:
            metric = f"timing_s/{name}"
            seen = f"{metric} takes {share:.0%} of the time, more than {threshold:.0%}"
            first, last = int(spent.steps[0]), int(spent.steps[-1])
            yield _Evidence(
                seen, metric, first, last, len(spent), share, threshold, setting
            )


def _idle_devices(run: RunLines) -> Iterator[_Evidence | None]:
    # Without GPUs all processes share the cores, so what is idle wastes none.
    if not run.metrics(r".*/perf/max_memory_reserved_gb"):
        return
    if run.at("placement.kind") == "separate":
        yield _above(run, "perf/trainers_idle", IDLE, "rollout.num_replicas")
        yield _above(run, "perf/rollouts_idle", IDLE, "rollout.num_replicas")
    yield _above(run, "perf/both_idle", BOTH_IDLE)


def _memory_near_limit(run: RunLines) -> Iterator[_Evidence | None]:
    pairs = [("perf/cpu_memory_used_gb", "perf/cpu_memory_total_gb", None)]
    for metric in run.metrics(r".*/perf/max_memory_reserved_gb"):
        role = metric.partition("/")[0]
        total = f"{role}/perf/device_memory_gb"
        pairs.append((metric, total, f"{role}.backend.micro_batch_tokens_per_rank"))

    for metric, total, setting in pairs:
        sizes = run.series(total).values
        if len(sizes):
            yield _above(run, metric, MEMORY * float(sizes[-1]), setting)


def _restarts(run: RunLines) -> Iterator[_Evidence | None]:
    lost = [stint for stint in run.history if stint.ending in ("failed", "killed")]
    if lost:
        seen = (
            f"{len(lost)} of the {len(run.history)} processes of the run failed or were"
            " killed"
        )
        steps = [stint.last_step or stint.first_step for stint in lost]
        count = len(lost)
        yield _Evidence(seen, HISTORY, min(steps), max(steps), count, count, 0)

    metric = "rollout/restarts"
    restarts = run.series(metric)
    yield _where(restarts, restarts.values > 0, metric, 0.0)


# ------------------------------------------------------------------------- the table

RULES = (
    Rule(
        "reward_collapse",
        "critical",
        "The reward collapses",
        f"the score falls below {COLLAPSED:.0%} of its best so far, from the lowest"
        f" score on, and by {NOISE:g} times its noise",
        "what was learned, or known before, is lost; batches differ by less",
        "Lower {actor.optimizer.lr}, or raise {algorithm.kl.coefficient}, and begin"
        " again with a checkpoint from before",
        _reward_collapse,
    ),
    Rule(
        "entropy_collapse",
        "warning",
        "The entropy collapses",
        f"{EXHAUSTED:.0%} of the entropy at the beginning remain, and less than"
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
        " scores stop to mean what they did (arXiv:2210.10760)",
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
        f"{OFTEN_CUT:.0%} of the responses are cut at the length limit",
        "a response without its answer scores as a wrong one, so the reward measures"
        " the limit (arXiv:2503.14476, section 3.4)",
        "Raise {rollout.max_response_tokens}",
        _responses_cut,
        unless="mostly_cut",
    ),
    Rule(
        "groups_without_spread",
        "warning",
        "Few groups teach anything",
        f"in {MOSTLY_EQUAL:.0%} of the groups all scores are equal, and advantages"
        " compare the members of a group",
        "the gradient comes from the other fifth (arXiv:2503.14476, section 3.2)",
        "Set {algorithm.dynamic_sampling} or a curriculum, or raise"
        " {rollout.group_size}",
        _groups_without_spread,
        unless="no_spread",
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
        "the last two evaluations are below the best one by"
        f" {STANDARD_ERRORS:g} standard errors, and the score in training rose since",
        "what is optimised is no longer what is wanted (arXiv:2210.10760)",
        "Take the best step, look at what {reward.kind} scores, or raise"
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
        "Lower {}",
        _skipped_updates,
    ),
    Rule(
        "loss_rises",
        "critical",
        "The loss rises",
        f"the loss in training is {RISEN:g} times its lowest median, and above it by"
        f" {NOISE:g} times its noise",
        "what is learned from data only falls, but for noise",
        "Lower the learning rate of the model that learns ({})",
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
        "Raise {}",
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
        "Look at the logs and at {}",
        lambda run: _episode_ends(run, FAULTS, OFTEN_FAULTY),
    ),
    Rule(
        "phase_dominates",
        "note",
        "A phase takes most of the time",
        ", ".join(
            f"`{name}` takes more than {share:.0%}"
            for name, (share, _) in PHASES.items()
        ),
        "generation is most of a step as a rule (arXiv:2405.11143), other phases are"
        " not",
        "What changes it: {}",
        _phase_dominates,
    ),
    Rule(
        "idle_devices",
        "note",
        "Devices are idle",
        f"trainers or engines with devices of their own are idle for {IDLE:.0%} of the"
        f" time, or both at once for {BOTH_IDLE:.0%}",
        "half of these devices would do, or a schedule in which the two overlap",
        "Choose another {rollout.schedule}, or other numbers of ranks and replicas",
        _idle_devices,
    ),
    Rule(
        "memory_near_limit",
        "warning",
        "Memory is nearly full",
        f"{MEMORY:.0%} of the memory of a device or of the driver's host are in use",
        "Ray ends processes at 95 % of a host, and an allocator that is full frees and"
        " allocates again and again",
        "Lower {data.prompts_per_step}, or tokens per micro-batch",
        _memory_near_limit,
    ),
    Rule(
        "restarts",
        "warning",
        "Processes were lost",
        "the driver failed or was killed, or a replica was started again",
        "each costs its start and the steps since the last state",
        "`faults.jsonl` says why; {run.recovery.max_restarts}",
        _restarts,
    ),
)
"""Every rule, the ones about learning first."""
