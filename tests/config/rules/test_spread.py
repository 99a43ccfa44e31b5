"""Groups whose scores are all equal: drawn again, or replaced by earlier ones."""

from __future__ import annotations

import pytest

from controllers.compose.composition import examine
from tests.config.rules.cases import Case

REPLAY = "algorithm=grpo algorithm.replay=64 algorithm.replay_age=4"
CORRECTED = "algorithm.correction.form=two_policy"

CASES = [
    Case(
        "drawing_again_waits_for_scores",
        "algorithm=dapo schedule=one_step_off placement=separate",
        "rollout.schedule",
        "scores decide which prompts a batch holds",
        "schedule=asynchronous",
    ),
    Case(
        "drawing_again_compares_groups",
        "algorithm=ppo algorithm.dynamic_sampling=10",
        "algorithm.dynamic_sampling",
        "algorithm.advantage=gae compares no responses of a group",
        "such as grpo",
    ),
    Case(
        "replay_compares_groups",
        "algorithm=rae algorithm.replay=8 algorithm.replay_age=4",
        "algorithm.replay",
        "algorithm.advantage=rae compares no responses of a group",
        "Set it to null",
    ),
    Case(
        "replay_is_possible",
        "algorithm=grpo algorithm.replay=64",
        "algorithm.replay_age",
        "algorithm.replay=...",
        "4",
    ),
    Case(
        "replay_is_possible",
        "algorithm=grpo algorithm.replay_age=4",
        "algorithm.replay_age",
        "algorithm.replay=null",
        "null",
    ),
    Case(
        "replay_has_groups_to_replace",
        f"{REPLAY} algorithm.dynamic_sampling=10",
        "algorithm.replay",
        "leaves no group whose scores are all equal",
        "Set one of the two to null",
    ),
    Case(
        "replay_is_possible",
        f"{REPLAY} algorithm.brevity=0.1 algorithm.overlong_share=0.2",
        "algorithm.replay",
        "teaches something with algorithm.overlong_share and algorithm.brevity",
        "leave these out",
    ),
    Case(
        "replay_is_possible",
        f"{REPLAY} reward.normalise=running reward.clip=5",
        "reward.normalise",
        "would enter its moments again",
        "Use batch or none",
    ),
    Case(
        "stale_tokens_are_corrected",
        REPLAY,
        "algorithm.correction.form",
        "tokens may be 4 policy versions old (algorithm.replay_age), and nothing corrects",
        "two_policy",
    ),
]


@pytest.mark.parametrize(
    "overrides", [[*REPLAY.split(), CORRECTED], ["algorithm=dapo"]], ids=" ".join
)
def test_both_are_possible(overrides: list[str]) -> None:
    assert examine("quickstart", overrides).problems == []
