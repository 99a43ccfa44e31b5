"""A table of families of language models, with what the proof of each shows.

python -m scripts.families              all of `tiny_families.py`, seconds each
python -m scripts.families --ranks      with ranks, up to half a minute each
python -m scripts.families --rollouts   with vLLM, half a minute each
python -m scripts.families --learn      two steps of GRPO of twelve, a minute each
python -m scripts.families mixtral      this one, with or without the flags
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.family_runs import SETTINGS, learn
from scripts.tiny_families import ALONE, PACKED, REFUSED, tiny_config
from verl_ray.proofs.claims import Claim
from verl_ray.proofs.proof import Proof, prove

COLUMNS = (
    *("family", "rows", "log-probs", "gradients"),
    *("fsdp", "adapter", "Megatron", "vLLM"),
)

MOST_CHARACTERS = 100
"""Of a reason."""

_RUN_COLUMNS = ("family", "settings", "vLLM after a sync", "norms of gradients")


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="those of the table, or of --learn")
    parser.add_argument(
        "--ranks", action="store_true", help="ask ranks of fsdp and of megatron as well"
    )
    parser.add_argument("--rollouts", action="store_true", help="ask vLLM as well")
    parser.add_argument("--learn", action="store_true", help="train for two steps")
    arguments = parser.parse_args()
    if arguments.learn:
        _print_runs(arguments.families or SETTINGS)
        return

    print(_row(COLUMNS))
    print(_row(["---"] * len(COLUMNS)))
    for family in arguments.families or [*PACKED, *ALONE, *REFUSED]:
        cells = _cells(family, rollouts=arguments.rollouts, ranks=arguments.ranks)
        print(_row([family, *cells]), flush=True)


def _print_runs(families: Iterable[str]) -> None:
    """Print a row for each run: what it set, and how far vLLM was off after a sync."""
    print(_row(_RUN_COLUMNS))
    print(_row(["---"] * len(_RUN_COLUMNS)))
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            steps = learn(family, Path(folder))
        worst = max(step["weight_sync/probe_difference"] for step in steps)
        norms = ", ".join(f"{step['actor/grad_norm']:.1g}" for step in steps)
        settings = f"`{' '.join(SETTINGS[family])}`" if SETTINGS[family] else ""
        print(_row([f"`{family}`", settings, f"{worst:.0e}", norms]), flush=True)


def _cells(family: str, *, rollouts: bool, ranks: bool) -> Sequence[str]:
    """Return the cells of a family, after its name."""
    others = [""] * (len(COLUMNS) - 2)
    try:
        proof = prove(tiny_config(family), rollouts=rollouts, ranks=ranks)
    except Exception as error:  # the other families are of interest all the same
        reason = f"{type(error).__name__}: {error}"
        return [f"refused: {_few_words(reason)}", *others]

    claims = {claim.statement: claim for claim in proof.claims}
    kind = "packed rows" if proof.engine.packs_rows else "rows of one length"
    if not proof.engine.trains:
        first = next(claim for claim in proof.claims if not claim.holds)
        where = f"in {_few_words(first.where)}"
        return ["refused", _number(first), where, *others[2:]]
    return [
        kind.removesuffix(" rows").removeprefix("rows "),
        _number(claims[f"log-probs of {kind}"]),
        _number(claims[f"gradients of {kind}"]),
        _shared(proof, "fsdp"),
        _number(claims["an adapter"]),
        _shared(proof, "megatron"),
        _vllm(proof),
    ]


def _few_words(reason: str) -> str:
    """Return the beginning of a reason, as a cell of the table."""
    return reason.partition("\n")[0].replace("|", "/")[:MOST_CHARACTERS]


def _shared(proof: Proof, backend: str) -> str:
    """Return what the ranks of a backend that share the model show."""
    ranks = next((each for each in proof.ranks if each.backend == backend), None)
    if ranks is None:
        return ""
    numbers = _on_ranks(ranks.claims)
    if not ranks.no_place:
        return numbers
    return f"one rank: {numbers}" if numbers else "no place"


def _on_ranks(claims: Sequence[Claim]) -> str:
    """Return the largest difference of log-probs, and that of gradients."""
    broken = next((claim for claim in claims if not claim.holds), None)
    if broken is not None:
        what = broken.statement.partition(" ")[0]
        return f"no: {what} {_number(broken)} {_few_words(broken.where)}".rstrip()
    largest = {"log-probs": 0.0, "gradients": 0.0}
    for claim in claims:
        what = claim.statement.partition(" ")[0]
        if what in largest:
            largest[what] = max(largest[what], claim.number or 0.0)
    return ", ".join(f"{number:.0e}" for number in largest.values()) if claims else ""


def _number(claim: Claim) -> str:
    return "error" if claim.number is None else f"{claim.number:.0e}"


def _vllm(proof: Proof) -> str:
    """Return the largest difference of the loads that agree, or what is in the way."""
    if not proof.rollout_claims:
        return ""
    if proof.rollouts is None:
        first = next(claim for claim in proof.rollout_claims if not claim.holds)
        return f"no: {_number(first)} {_few_words(first.where)}".rstrip()
    numbers = [claim.number or 0.0 for claim in proof.rollout_claims[-3:]]
    worst = f"{max(numbers):.0e}"
    if proof.rollouts.dtype != "float32":
        return f"{worst} (`{proof.rollouts.dtype}`, mean)"
    return worst if proof.rollouts.model_impl == "auto" else f"{worst} (`model_impl`)"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
