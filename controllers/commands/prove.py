"""The command `prove`: whether this project computes a model as its family does.

Invariant: it needs no weights, no data and no accelerator, though kernels of states are
asked where a GPU and they are; the model is cut to a few layers of each kind and gets
random weights. What it finds about vLLM is kept, so that `check` and the start of a run
know it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from verl_ray.errors import ModelError
from verl_ray.preflight.model_proof import (
    RolloutProof,
    keep_rollout_proof,
    modules_alone,
)
from verl_ray.profiling.phases import blocking
from verl_ray.settings.config_json import not_computed

if TYPE_CHECKING:
    from verl_ray.proofs.proof import Proof, RolloutSettings
    from verl_ray.proofs.rank_proof import RankClaims


def main(argv: list[str]) -> int:
    """Print what was found.

    Returns:
        0 if the model can be trained, 1 if it cannot, and 2 if transformers reads no
        configuration in the directory or builds no model of it.
    """
    arguments = _parser().parse_args(argv)
    try:
        return _main(arguments)
    except ModelError as error:
        print(error.report(), file=sys.stderr)
        return 2


def _main(arguments: argparse.Namespace) -> int:
    """Do the same, with what was typed."""
    started_s = time.monotonic()
    with blocking(f"proving {arguments.model}"):
        if arguments.trust_remote_code:
            proof, unusable = _proven_in_child(arguments)
        else:
            proof, unusable = _proven(arguments)
    keep = functools.partial(
        keep_rollout_proof, arguments.model, trusts_code=arguments.trust_remote_code
    )
    if proof.rollouts is not None:
        keep(RolloutProof(proof.rollouts.model_impl, proof.rollouts.dtype))
    elif proof.rollouts_disagree:
        keep(RolloutProof(None, None))
    if arguments.json:
        print(json.dumps(proof.as_json(), indent=2))
        return 0 if proof.engine.trains else 1

    part = "" if proof.whole is None else f", the text part of {proof.whole}"
    size = f"cut to {proof.layers} layers, random weights, float32"
    print(f"{proof.family}{part}, {size}")
    # There is a way round each claim that fails while the model can be trained.
    otherwise = "no" if proof.engine.trains else "FAIL"
    for claim in proof.claims:
        print(f"  {claim.line(otherwise)}")
    for each in proof.ranks:
        if each.no_place:
            print(f"  --   {each.backend} has no place for it: {each.no_place}")
    print(_in_words(proof, with_rollouts=arguments.rollouts))
    if unusable is not None:
        print(f"A run refuses the directory itself: {unusable}.")
    print(f"proven in {time.monotonic() - started_s:.0f} s")
    return 0 if proof.engine.trains else 1


def _proven(arguments: argparse.Namespace) -> tuple[Proof, str | None]:
    """Return the proof of a model, and why a run refuses its directory, if it does."""
    # torch takes seconds to import.
    from verl_ray.proofs.proof import config_of, prove

    config = config_of(arguments.model, trusts_code=arguments.trust_remote_code)
    proof = prove(config, rollouts=arguments.rollouts, ranks=arguments.ranks)
    return proof, not_computed(config.to_dict())


def _proven_in_child(arguments: argparse.Namespace) -> tuple[Proof, str | None]:
    """Return the same of a model whose code runs, in another process."""
    # The child inherits the folder.
    with modules_alone(), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_proven, arguments).result()


def _in_words(proof: Proof, *, with_rollouts: bool) -> str:
    """Return what follows from the claims."""
    if not proof.engine.trains:
        return "It cannot be trained here: see the first claim that fails."
    if proof.engine.packs_rows:
        words = "It trains, with packed rows."
    elif proof.packs_rows:
        words = "It trains, with packed rows, by kernels on a GPU."
    else:
        words = (
            "It trains, with micro-batches of rows of equal length, since packed rows"
            " see each other: more micro-batches, and no losses over pairs of rows."
        )
    if not proof.engine.has_values:
        words += " It is no critic and no reward model."
    if not proof.engine.has_adapters:
        words += " It learns without an adapter alone."
    words += "".join(_on_ranks(each) for each in proof.ranks if not each.no_place)
    if not with_rollouts:
        return words
    return f"{words} {_rollouts_in_words(proof.rollouts)}"


def _rollouts_in_words(settings: RolloutSettings | None) -> str:
    if settings is None:
        return "vLLM does not agree with it: supervised training alone."
    if settings.dtype != "float32":
        return (
            "vLLM computes it in bfloat16 alone on a CPU, and agrees up to rounding:"
            f" rollout.dtype={settings.dtype}"
        )
    if settings.model_impl == "auto":
        return "vLLM agrees with it."

    speed = ""
    if settings.relative_speed is not None:
        speed = (
            ", which generates the cut model at"
            f" {settings.relative_speed:.2g} times the speed of vLLM's own"
        )
    return (
        "vLLM's own class does not agree with it, but that of transformers"
        f" does{speed}: rollout.vllm_args.model_impl={settings.model_impl}"
    )


def _on_ranks(ranks: RankClaims) -> str:
    """Return what follows for ranks of a backend that share the model."""
    if ranks.agrees:
        return f" Ranks of {ranks.backend} agree with it."
    return (
        f" Ranks of {ranks.backend} do not agree with it: do not take"
        f" {ranks.backend} as a backend."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray prove", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("model", help="a model directory, of which config.json is read")
    parser.add_argument(
        "--no-rollouts",
        dest="rollouts",
        action="store_false",
        help="leave vLLM out, which takes half a minute",
    )
    parser.add_argument(
        "--no-ranks",
        dest="ranks",
        action="store_false",
        help="leave out ranks that share the model, which take up to half a minute",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code in the directory, in a process of its own",
    )
    parser.add_argument("--json", action="store_true", help="print values for machines")
    return parser
