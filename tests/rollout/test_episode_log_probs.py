"""Rows of episodes against a forward pass: what was sampled is what is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agents.templates import MERGING, PRESERVING, STRIPPING, tokenizer_with
from tests.rollout.conftest import EngineStarter
from verl_ray.agents.contract import (
    Action,
    End,
    Episode,
    EpisodeRow,
    EpisodeTask,
    ToolCall,
)
from verl_ray.agents.policy import (
    Limits,
)
from verl_ray.agents.wire import EpisodeStart
from verl_ray.columns.stages import Finish
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.models.tiny import make_tiny
from verl_ray.rollout.episode_stream import EpisodeRequest
from verl_ray.rollout.episodes import EpisodePool
from verl_ray.rollout.growing import GrowingTurn, SpecialNames
from verl_ray.rollout.requests import Sampling
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.texts import GrowingText

pytestmark = [pytest.mark.processes, pytest.mark.vllm]

ENVIRONMENTS = Path(__file__).with_name("environments.py")
TOKENIZER = tokenizer_with(PRESERVING)
END = TOKENIZER.eos_token_id
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8)
LIMITS = Limits(max_turns=6, context_tokens=1024, max_turn_tokens=6)
CASES = [(turns, tool) for turns in range(1, 7) for tool in (False, True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = TinyModelConfig(
        hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=192,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3_moe", folder, Path(TOKENIZER.name_or_path), config, 0)
    policy = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # At about half of all places the turn ends.
        policy.lm_head.weight[END] *= 8
    policy.save_pretrained(folder)
    return folder


class Reader:
    """Takes a turn as no call, a call or two, whatever its words are."""

    def __call__(
        self, tokens: Sequence[int], finish: Finish, tools: Sequence[Any]
    ) -> Action:
        count = tokens[0] % 3 if tools else 0
        calls = [ToolCall("add", {"é": number}) for number in range(count)]
        text = TOKENIZER.decode([token for token in tokens if token != END])
        return Action(tokens, text, calls, finish.name.lower())

    def growing(self, *_: Any) -> GrowingTurn:
        text = GrowingText(TOKENIZER, spells_special_tokens=True)
        return GrowingTurn(text, None, SpecialNames([]), None, is_open=False)


def episodes_of(
    server: RolloutServer, model: Path, template: str, name: str = "Various"
) -> dict[int, Episode]:
    start = EpisodeStart(
        {"default": (f"{ENVIRONMENTS}:{name}", {})}, str(model), LIMITS, template
    )
    pool = EpisodePool(
        server, start, Reader(), num_processes=1, most_open=16, stall_s=60.0
    )  # fmt: skip
    try:
        requests = [
            EpisodeRequest(
                number,
                EpisodeTask(
                    [{"role": "user", "content": "Grüße 🙂"}],
                    extra={"num_turns": turns, "has_tool": tool},
                ),
                seed=number,
                environment_seed=0,
                sampling=SAMPLING,
                session="0",
            )
            for number, (turns, tool) in enumerate(CASES)
        ]
        stream = pool.run(requests)
        episodes: dict[int, Episode] = {}
        while not stream.has_ended:
            episodes |= dict(stream.take(60.0))
        return episodes
    finally:
        pool.close()


def _require_choices(row: EpisodeRow, router_logits: Sequence[torch.Tensor]) -> None:
    """Require that the experts of a row are those of a forward pass over it."""
    last = max(i for i, sampled in enumerate(row.mask) if sampled)
    assert row.routed_experts is not None
    chosen = torch.stack([each.topk(2).indices for each in router_logits], 1)
    recorded = torch.from_numpy(row.routed_experts.astype(int))
    assert torch.equal(recorded[:last].sort().values, chosen[:last].sort().values)
    assert len(recorded) == len(row.tokens) and not recorded[last:].any()


def _sampled(episode: Episode) -> list[Any]:
    """Return what two runs of an episode have in common, whichever call came first."""
    paths = sorted(row.tokens for row in episode.rows)
    turns = [
        (token, log_prob)
        for row in episode.rows
        for token, log_prob, own in zip(
            row.tokens, row.log_probs, row.mask, strict=True
        )
        if own
    ]
    return [paths, sorted(turns), episode.response]


def _require_log_probs(policy: Any, row: EpisodeRow) -> None:
    """Require that a forward pass over a row gives what was sampled in it."""
    with torch.no_grad():
        outputs = policy(torch.tensor([row.tokens]), output_router_logits=True)
    _require_choices(row, outputs.router_logits)
    computed = outputs.logits[0][:-1].log_softmax(-1)
    computed = computed.gather(1, torch.tensor(row.tokens)[1:, None])
    mask = torch.tensor(row.mask)
    sampled = torch.tensor(row.log_probs)[mask]
    torch.testing.assert_close(sampled, computed[mask[1:], 0], atol=5e-5, rtol=0)


def test_a_forward_pass_over_each_row_gives_the_samplers_log_probs(
    model: Path, start_vllm: EngineStarter
) -> None:
    engine = start_vllm(
        model, initial_version=0, max_model_len=1024, routing_replay=True
    )
    server = RolloutServer(lambda: engine)
    policy = AutoModelForCausalLM.from_pretrained(model)
    num_rows, num_turns = [], 0
    try:
        for template in (PRESERVING, MERGING, STRIPPING):
            for number, episode in episodes_of(server, model, template).items():
                assert (episode.end, episode.num_turns) == (
                    End.COMPLETED,
                    CASES[number][0],
                )
                # Each turn is trained once, however many rows hold it.
                rewards = [pair for row in episode.rows for pair in row.rewards]
                assert len(rewards) == episode.num_turns
                num_turns += len(rewards)
                num_rows.append(len(episode.rows))
                for row in episode.rows:
                    _require_log_probs(policy, row)

        # An agent of its own: six turns, of which two were sampled beside each other,
        # and one behind a turn that nobody has sampled.
        for template in (PRESERVING, STRIPPING):
            first, again = (
                episodes_of(server, model, template, name)
                for name in ("branching", "streaming")
            )
            for number, episode in first.items():
                assert _sampled(again[number]) == _sampled(episode)
                # Its turns came by parts.
                assert again[number].score > 6 and again[number].metrics == {}
                assert (episode.end, episode.num_turns) == (End.COMPLETED, 6)
                turns = [number for row in episode.rows for number in row.turns]
                assert sorted(turns) == list(range(6)) and len(episode.rows) >= 3
                for row in (*episode.rows, *again[number].rows):
                    _require_log_probs(policy, row)
    finally:
        server.close()
    # Some episodes are one row, others begin one where a turn was cut.
    assert num_turns == 3 * 2 * 21 and min(num_rows) == 1 < max(num_rows)
