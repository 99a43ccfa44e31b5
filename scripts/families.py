"""A table of families of language models, with what the proof of each shows.

python -m scripts.families                      those of `tiny_families.py`
python -m scripts.families --rollouts mixtral   with vLLM, half a minute each
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from scripts.tiny_families import ALONE, PACKED, REFUSED, tiny_config
from verl_ray.errors import ModelError
from verl_ray.proofs.claims import Claim
from verl_ray.proofs.proof import Proof, prove

COLUMNS = ("family", "rows", "log-probs", "gradients", "adapter", "vLLM")


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", default=[*PACKED, *ALONE, *REFUSED])
    parser.add_argument("--rollouts", action="store_true", help="ask vLLM as well")
    arguments = parser.parse_args()

    print(_row(COLUMNS))
    print(_row(["---"] * len(COLUMNS)))
    for family in arguments.families:
        print(_row(_cells(family, rollouts=arguments.rollouts)), flush=True)


def _cells(family: str, *, rollouts: bool) -> Sequence[str]:
    try:
        proof = prove(tiny_config(family), rollouts=rollouts)
    except ModelError as error:
        return [family, f"refused: {error}", "", "", "", ""]

    claims = {claim.statement: claim for claim in proof.claims}
    kind = "packed rows" if proof.engine.packs_rows else "rows of one length"
    if not proof.engine.trains:
        first = next(claim for claim in proof.claims if not claim.holds)
        where = first.where.partition("\n")[0]
        return [family, "refused", _number(first), f"in {where}", "", ""]
    return [
        family,
        kind,
        _number(claims[f"log-probs of {kind}"]),
        _number(claims[f"gradients of {kind}"]),
        _number(claims["an adapter"]),
        _vllm(proof),
    ]


def _number(claim: Claim) -> str:
    return "error" if claim.number is None else f"{claim.number:.0e}"


def _vllm(proof: Proof) -> str:
    """Return the largest difference of the loads that agree, or what is in the way."""
    if not proof.rollout_claims:
        return ""
    if proof.rollouts is None:
        first = proof.rollout_claims[0]
        return f"no: {_number(first)} {first.where.partition(chr(10))[0]}".rstrip()
    numbers = [claim.number or 0.0 for claim in proof.rollout_claims[-3:]]
    worst = f"{max(numbers):.0e}"
    return worst if proof.rollouts == "auto" else f"{worst} (`model_impl`)"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
