"""Functions, services, judges and mixtures."""

from __future__ import annotations

from pathlib import Path

from controllers.compose.composition import examine
from tests.config.rules.cases import JUDGE, Case
from verl_ray.config.reward import TEMPLATE_FIELDS
from verl_ray.rewards.request import ScoreRequest

MIXED = "reward=mixed reward.components.model.model.path=/rm"
EPISODES = (
    "agent.environments.default=my_env.py:Game reward.functions.default=environment"
)
FUNCTION = (
    "{kind: function, num_ranks: 1, processes_per_rank: 1, deadline_s: 1.0, functions: {default: exact_match}, "
    "normalise: none, clip: null, max_failed_fraction: 0.1}"
)

CASES = [
    Case(
        "agent_problems",
        "agent.max_turns=3",
        "agent.max_turns",
        "every rollout is a single response",
        "Set agent.environments.default",
    ),
    Case(
        "agent_problems",
        "reward.functions.default=environment",
        "reward.functions.default",
        "there are no episodes",
        "Set agent.environments.default",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} agent.ends.max_turn=mask",
        "agent.ends",
        "no episode ends so",
        "Did you mean max_turns?",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} algorithm=remax",
        "algorithm.advantage",
        "its greedy response is a single one",
        "Use rloo",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} algorithm.overlong_share=0.2",
        "agent.max_tokens",
        "the last share of what an episode may have",
        "algorithm.overlong_share=null",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} agent.max_turn_tokens=200000",
        "agent.max_turn_tokens",
        "is reached before",
        "Lower it, or leave it out",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} agent.turn_timeout_s=60.5 agent.episode_timeout_s=60",
        "agent.turn_timeout_s",
        "agent.episode_timeout_s=60.0 is reached before",
        "Lower it, or leave it out",
    ),
    Case(
        "agent_problems",
        f"{EPISODES} agent.ends.completed=drop",
        "agent.ends",
        "says nothing of the policy, and such an episode does",
        "Use mask",
    ),
    Case(
        "rewards_have_a_function",
        "reward.functions={}",
        "reward.functions",
        "no data source has a reward function",
        "default: exact_match",
    ),
    Case(
        "rewards_have_a_function",
        "evaluation.functions={}",
        "evaluation.functions",
        "no data source has a reward function",
        "Set 'evaluation.functions={default: exact_match}'",
    ),
    Case(
        "normalised_scores_matter",
        "algorithm=grpo reward.normalise=batch",
        "reward.normalise",
        "whatever the scale of scores, which undoes this",
        "Set it to none, or give reward.clip",
    ),
    Case(
        "normalised_scores_are_positive",
        "algorithm=maxrl reward.normalise=running",
        "reward.normalise",
        "normalised scores lie around 0",
        "Set it to none",
    ),
    Case(
        "mixed_rewards_have_weights",
        f"{MIXED} reward.weights.modl=1.0",
        "reward.weights.modl",
        "there is no component modl",
        "Did you mean model?",
    ),
    Case(
        "mixed_rewards_have_weights",
        f"{MIXED} ~reward.weights.model",
        "reward.weights.model",
        "has no weight",
        "=1.0",
    ),
    Case(
        "mixed_rewards_have_weights",
        f"{MIXED} reward.weights.model=0",
        "reward.weights.model",
        "computed and then ignored",
        "leave the component out",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} reward.lowest=11",
        "reward.highest",
        "above reward.lowest",
        "above 11.0",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.verdict=\"a(\"'",
        "reward.verdict",
        "no regular",
        "one group",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.verdict=\"abc\"'",
        "reward.verdict",
        "and has 0",
        "one group",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.verdict=\"(a*)\"'",
        "reward.verdict",
        "empty response",
        "one group",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} reward.template=Grade",
        "reward.template",
        "not see",
        "{{ response }}",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.template=\"{{{{ response }}}} {{% if %}}\"'",
        "reward.template",
        "this is no template (Expected an expression",
        "extra, episode_score, episode_end, episode_messages, episode_conversations or episode_output can be shown",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.template=\"{{{{ respones | upper }}}}\"'",
        "reward.template",
        "there is no respones to show (did you mean response?)",
        "{{ response }}",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} 'reward.template=\"{{{{ response | uper }}}}\"'",
        "reward.template",
        "this is no template (No filter named 'uper'",
        "{{ response }}",
    ),
    Case(
        "judge_settings_work",
        f"{JUDGE} reward.temperature=0.001",
        "reward.temperature",
        "0.01",
        "0 for greedy",
    ),
    Case(
        "requests_end_before_their_batch",
        "reward=http reward.url=http://h/s reward.request_timeout_s=200",
        "reward.request_timeout_s",
        "reward.deadline_s=120.0 bounds a batch",
        "at most 120.0",
    ),
    Case(
        "graders_finish_within_the_stall_limit",
        "run.stall_s=60 reward.deadline_s=100",
        "reward.deadline_s",
        "run.stall_s=60.0 ends the run before",
        "at most 60.0",
    ),
]


def test_the_name_of_a_component_goes_into_keys(tmp_path: Path) -> None:
    """A path below another name would not be made absolute.

    The weight of a name with a dot would not be found.
    """
    (tmp_path / "reward").mkdir()
    for name, right in (("style_2", True), ("my-style", False), ("a.b", False)):
        mixture = f"kind: mixed\ncomponents:\n  {name}: {FUNCTION}\nweights: {{{name}: 1.0}}\n"
        (tmp_path / "reward" / "mine.yaml").write_text(mixture)
        problems = examine(
            "quickstart", ["reward=mine", "prepare.min_gain=0"], str(tmp_path)
        ).problems
        assert [(problem.key, problem.fix) for problem in problems] == (
            []
            if right
            else [(f"reward.components.{name}", "Use letters, digits and _.")]
        )


def test_the_rules_know_what_a_judge_can_be_shown() -> None:
    request = ScoreRequest("r", None, "p", "s", {})
    assert all(hasattr(request, name) for name in TEMPLATE_FIELDS)
