"""The proof of a model, and what of this project the model can use.

Invariant: a model is refused only for a claim that does not hold, and the claim, its
number and the module it fails in are said.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ModelError
from verl_ray.hub.model_folders import CODE, json_object, needs_code
from verl_ray.models.heads import logit_shape
from verl_ray.models.parts import backbone_of, read_config, text_config
from verl_ray.models.routing import RouterWatch
from verl_ray.models.state_kernels import hide_kernels
from verl_ray.proofs.border_proof import prove_borders
from verl_ray.proofs.claims import Claim
from verl_ray.proofs.cut_model import cut_model, model_on_meta
from verl_ray.proofs.engine_proof import TOLERANCE, EngineClaims, EngineProof
from verl_ray.proofs.rank_proof import RankClaims, expect, prove_ranks
from verl_ray.proofs.rollout_proof import RolloutClaims, prove_rollouts
from verl_ray.proofs.rows import random_rows
from verl_ray.settings.config_json import PLAIN_FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ALPHABET = "0123456789+= "
"""Of the tokenizer of a cut model. vLLM asks it how responses end."""

_IMPLEMENTATIONS = ("auto", "transformers")
"""Values of vLLM's `model_impl`, the faster one first."""


@dataclass(frozen=True)
class RolloutSettings:
    """How vLLM agrees with the trainer."""

    model_impl: str
    """Its own classes ("auto"), or those of "transformers"."""

    dtype: str
    """In which it computes: "float32", or "bfloat16" if it does not in float32."""

    relative_speed: float | None
    """Tokens per second of the cut model, of those of vLLM's own class.

    None where that one agrees, or computes nothing.
    """


@dataclass(frozen=True)
class Routers:
    """The routers of a model, as an engine sees them."""

    are_seen: bool
    """Whether the family's class declares them."""

    return_choices: bool
    """Whether they return the experts of each token, whose balance is computed."""

    have_biases: bool
    """Whether a run can move the biases of their choice."""


@dataclass(frozen=True)
class Proof:
    """The proof of a model: its claims, and what follows from them."""

    family: str
    """Its model_type."""

    layers: int
    """Layers of the cut model, two of each kind."""

    whole: str | None
    """The model_type of the model whose text part was proven; None if it has no other
    part."""

    engine: EngineClaims

    routers: Routers

    border_claims: Sequence[Claim]
    """The claims about kernels that take the borders of packed rows; none for a model
    that packs rows without them, or where none are installed or no GPU is."""

    rollout_claims: Sequence[Claim]
    """The claims about vLLM; none if it was not asked."""

    rollouts: RolloutSettings | None
    """None if vLLM does not agree, or was not asked."""

    ranks: Sequence[RankClaims] = ()
    """The claims about ranks of each backend; none if they were not asked."""

    @property
    def rollouts_disagree(self) -> bool:
        """Whether vLLM was asked, computes the model, and computes something else."""
        numbers = [claim.number for claim in self.rollout_claims]
        return self.rollouts is None and bool(numbers) and None not in numbers

    @property
    def claims(self) -> Sequence[Claim]:
        """All claims, those about the engine first."""
        ranks = [claim for each in self.ranks for claim in each.claims]
        return [
            *self.engine.claims,
            *self.border_claims,
            *ranks,
            *self.rollout_claims,
        ]

    @property
    def packs_rows(self) -> bool:
        """Whether rows may lie one behind the other."""
        by_kernels = [claim.holds for claim in self.border_claims]
        return self.engine.packs_rows or (bool(by_kernels) and all(by_kernels))

    def as_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "family": self.family,
            "layers": self.layers,
            "whole": self.whole,
            "trains": self.engine.trains,
            "packs_rows": self.packs_rows,
            "has_states": not self.engine.packs_rows,
            "has_values": self.engine.has_values,
            "has_adapters": self.engine.has_adapters,
            "has_balance": self.routers.return_choices,
            "has_biases": self.routers.have_biases,
            "backends": {
                each.backend: {"agrees": each.agrees, "no_place": each.no_place}
                for each in self.ranks
            },
            "rollouts": asdict(self.rollouts) if self.rollouts else None,
            "claims": [asdict(claim) | {"holds": claim.holds} for claim in self.claims],
        }


def prove(config: PretrainedConfig, *, rollouts: bool, ranks: bool = False) -> Proof:
    """Prove a model by its configuration, with random weights.

    Args:
        config: The configuration of the model, of which the text part is proven.
        rollouts: Whether to ask vLLM as well, which takes half a minute.
        ranks: Whether to ask ranks that share the model, which takes up to half a
            minute.

    Raises:
        ModelError: The model cannot be cut or built.
    """
    _prepare_transformers()
    text = text_config(config)
    cut, model = cut_model(text, seed=1)
    with tempfile.TemporaryDirectory(prefix="verl_ray-proof-") as root:
        folder = Path(root) / "model"
        model.save_pretrained(folder)
        character_tokenizer(folder, _ALPHABET)

        routers = _routers_of(model)
        engine_proof = EngineProof(model, folder)
        engine = engine_proof.examine()
        for claim in _claims_of_the_whole(config, model):
            engine = engine.with_needed(claim)
        border_claims = prove_borders(folder, engine, has_experts=routers.are_seen)
        rank_claims: Sequence[RankClaims] = ()
        if ranks and engine.trains:
            expected = expect(
                model,
                engine_proof.row_by_row,
                folder,
                packs_rows=engine.packs_rows,
                has_experts=routers.are_seen,
            )
            # As much memory as the model takes three times.
            del model, engine_proof
            rank_claims = prove_ranks(expected)

        claims: list[Claim] = []
        settings = None
        if rollouts and engine.trains:
            ask = functools.partial(
                prove_rollouts,
                folder,
                packs_rows=engine.packs_rows,
                has_experts=routers.are_seen,
            )
            claims, settings = _settings_that_agree(ask)
    return Proof(
        family=text.model_type,
        layers=cut.num_hidden_layers,
        whole=None if text is config else config.model_type,
        engine=engine,
        routers=routers,
        border_claims=border_claims,
        rollout_claims=claims,
        rollouts=settings,
        ranks=rank_claims,
    )


def _prepare_transformers() -> None:
    """Hide kernels, and bars and warnings, which would stand between the claims."""
    from transformers.utils import logging

    hide_kernels()
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _routers_of(model: PreTrainedModel) -> Routers:
    watch = RouterWatch(backbone_of(model))
    with watch.recording() as decisions, torch.no_grad():
        model(random_rows()[0][None], use_cache=False)
    return Routers(bool(watch.routers), bool(decisions), bool(watch.biases))


def _claims_of_the_whole(
    config: PretrainedConfig, model: PreTrainedModel
) -> Iterator[Claim]:
    """Yield the claims about a model that sees images as well; none about others.

    Args:
        config: The configuration of the whole model.
        model: The cut model of its text part.
    """
    if text_config(config) is config:
        return
    yield _claim_of_logits(config)
    if config.text_config.model_type in PLAIN_FAMILIES:
        yield _claim_of_plain_text(config, model)


def _claim_of_logits(config: PretrainedConfig) -> Claim:
    """Compare the logits of a text part with those that the whole model makes of them.

    Classes of models that see images have forward passes of their own, and some leave
    out a factor or a cap.
    """
    whole = logit_shape(model_on_meta(config))
    alone = logit_shape(model_on_meta(text_config(config)))
    number = abs(whole.factor - alone.factor) + abs(
        (whole.softcap or 0.0) - (alone.softcap or 0.0)
    )
    where = "" if whole == alone else f"the whole has {whole}, its text part {alone}"
    return Claim("logits of the whole model", number, 0.0, where)


def _claim_of_plain_text(config: PretrainedConfig, model: PreTrainedModel) -> Claim:
    """Compare a plain language model with the text part whose weights it has.

    Args:
        config: The configuration of the whole model.
        model: The cut model.
    """
    from transformers import AutoModel

    own = config.text_config
    settings = model.config.to_dict() | {"rope_parameters": own.rope_parameters}
    del settings["model_type"]
    part = AutoModel.from_config(
        type(own)(**settings), dtype=torch.float32, attn_implementation="eager"
    )
    backbone = backbone_of(model)
    part.eval().load_state_dict(backbone.state_dict())
    with torch.no_grad():
        number = max(
            float(
                (part(row).last_hidden_state - backbone(row).last_hidden_state)
                .abs()
                .max()
            )
            for row in (row[None] for row in random_rows())
        )
    return Claim(f"hidden states of {own.model_type}", number, TOLERANCE)


def _settings_that_agree(
    ask: Callable[..., RolloutClaims],
) -> tuple[list[Claim], RolloutSettings | None]:
    """Return all claims about vLLM, and the first settings with which it agrees."""
    answers: dict[str, RolloutClaims] = {}
    for each in _IMPLEMENTATIONS:
        answers[each] = ask(implementation=each)
        if answers[each].hold:
            break
    claims = [claim for answer in answers.values() for claim in answer.claims]
    if answers[each].hold:
        rates = [answer.tokens_per_s for answer in answers.values()]
        speed = None
        if len(rates) == 2 and rates[0] is not None and rates[1] is not None:
            speed = rates[1] / rates[0]
        return claims, RolloutSettings(each, "float32", speed)

    # What it does compute in float32 is wrong, which rounding must not hide.
    if any(answer.are_computed for answer in answers.values()):
        return claims, None
    rounded = ask(implementation="auto", dtype="bfloat16")
    claims += rounded.claims
    settings = RolloutSettings("auto", "bfloat16", None) if rounded.hold else None
    return claims, settings


def config_of(path: str, *, trusts_code: bool = False) -> PretrainedConfig:
    """Read the configuration of a model directory, whose code may be trusted.

    Raises:
        ModelError: There is none, its family is unknown to transformers, or the model
            has code of its own that is not trusted.
    """
    from transformers import __version__

    if not Path(path, "config.json").is_file():
        raise ModelError(
            f"there is no folder {path!r} with a config.json; of a model of the hub,"
            " fetch that file first"
        )
    if not trusts_code and needs_code(json_object(Path(path, "config.json"))):
        raise ModelError(
            f"is computed by the code in it ({CODE}), which may not run",
            fix="read the code, and give --trust-remote-code where you trust it",
            subject=path,
        )
    try:
        return read_config(path, trusts_code=trusts_code)
    except Exception as error:  # transformers raises several kinds
        raise ModelError(
            f"transformers {__version__} does not read {path}/config.json"
            f" (docs/start.md has the versions that this project takes): {error}"
        ) from error
