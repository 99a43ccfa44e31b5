"""Whether a model of any family is computed here, as its proof shows.

The families whose tensors `settings.config_json` describes are proven by the tests of
this project. Any other is proven when a run or a check first meets its config.json.

Invariant: torch is imported in another process alone. A proof is kept under what it
depends on: the configuration, and the versions of what computes it. What vLLM computes
is proven by the command `prove` alone, which keeps what it finds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ray.hub.model_folders import CODE, code_files, json_object
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.profiling.phases import blocking
from verl_ray.rollout.vllm_core import PACKAGES as VLLM_PACKAGES
from verl_ray.settings.config_json import (
    FAMILIES,
    has_windows,
    not_computed,
    text_part,
)

DEADLINE_S = 600.0
"""Longest time of a proof, which takes 10 s for most families."""

_EDITION = 4
"""Changes when this project computes models otherwise, so that proofs are done anew."""

_PACKAGES = (
    *("torch", "transformers", "peft"),
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm", "kernels"),
)
"""Packages that compute a model, of which some may be absent."""


@dataclass(frozen=True)
class ModelProof:
    """The part of a model's proof that a run has to know."""

    packs_rows: bool = True
    """Whether rows may lie one behind the other."""

    has_states: bool = False
    """Whether layers pass states from token to token beside attention."""

    has_values: bool = True
    """Whether the model can have a value head."""

    has_adapters: bool = True
    """Whether the model can learn by an adapter."""

    has_balance: bool = True
    """Whether the model has experts, and their balance is computed."""

    has_biases: bool = True
    """Whether its routers have biases of the choice that a run can move."""

    tensors: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Shape of each tensor of its checkpoint by its name; none of a model that is not
    computed, or that the tests of this project prove."""

    passed_over: Sequence[str] = ()
    """Patterns for the names of tensors that its checkpoint may have beside them."""

    failure: str | None = None
    """Why the model is not computed, as the end of a sentence; None if it is."""

    def packs_rows_in(self, dtype: str) -> bool:
        """Return whether rows are packed where the computation has a type.

        The kernels that keep rows apart in layers with states are proven in bfloat16.
        """
        return self.packs_rows and not (self.has_states and dtype == "float32")


@dataclass(frozen=True)
class RolloutProof:
    """The settings with which vLLM computes a model on a CPU as the trainer does."""

    model_impl: str | None
    """That of rollout.vllm_args; None if vLLM disagrees with every setting."""

    dtype: str | None
    """That of rollout; None if vLLM disagrees."""


def proof_of(path: str, *, trusts_code: bool = False) -> ModelProof:
    """Return the proof of the model in a directory, which is done if none is kept.

    A directory that is not there yet is that of a model which the run makes. A model
    that is refused for its config.json is not proven.

    Args:
        path: The directory.
        trusts_code: Whether code in it may run, in the process of the proof.
    """
    # The text part of a model that sees images is proven as a part of this model.
    settings = json_object(Path(path) / "config.json")
    code = _trusted_code(path, settings) if trusts_code else ""
    is_described = _is_described(settings) and not code
    if not settings or is_described or not_computed(text_part(settings)):
        return ModelProof()
    return _proof_of(path, json.dumps(settings, sort_keys=True), code)


def _trusted_code(path: str, settings: Mapping[str, object]) -> str:
    """Return what tells the code of a model apart from any other; "" if it has none."""
    if CODE not in settings:
        return ""
    folder = Path(path)
    digest = hashlib.sha256()
    for file in code_files(folder):
        contents = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder)} {contents}\n".encode())
    return digest.hexdigest()


def _is_described(settings: Mapping[str, object]) -> bool:
    return settings.get("model_type") in FAMILIES and not has_windows(settings)


def may_disagree_with_vllm(path: str, *, trusts_code: bool = False) -> bool:
    """Return whether neither the tests nor `prove` have asked vLLM about a model."""
    settings = json_object(Path(path) / "config.json")
    described = not settings or _is_described(settings)
    proof = kept_rollout_proof(path, trusts_code=trusts_code)
    return not described and proof is None


def kept_rollout_proof(path: str, *, trusts_code: bool = False) -> RolloutProof | None:
    """Return what `prove` has found about the model in a directory and this vLLM.

    None if it was not asked, or could not find out.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RolloutProof(**json.loads(_rollout_file(path, trusts_code).read_text()))
    return None


def keep_rollout_proof(
    path: str, proof: RolloutProof, *, trusts_code: bool = False
) -> None:
    """Keep what `prove` has found, in place of what it found before."""
    _keep(_rollout_file(path, trusts_code), proof)


def _rollout_file(path: str, trusts_code: bool) -> Path:
    settings = json_object(Path(path) / "config.json")
    code = _trusted_code(path, settings) if trusts_code else ""
    text = json.dumps(settings, sort_keys=True) + code
    return _folder() / f"{_key(text, VLLM_PACKAGES)}-rollouts.json"


@functools.cache
def _proof_of(path: str, settings: str, code: str) -> ModelProof:
    file = _folder() / f"{_key(settings + code)}.json"
    # A file that another version wrote, or that is damaged, is as good as none.
    with contextlib.suppress(OSError, ValueError, TypeError):
        return ModelProof(**json.loads(file.read_text()))

    with blocking(f"proving that the model in {path} is computed as its family does"):
        fields = {"path": path, "trusts_code": bool(code)}
        messages, cause = try_in_child(__name__, fields, DEADLINE_S)
    result = next((each for each in messages if each.kind == "ready"), None)
    if result is None:
        return ModelProof(failure=f"the process of its proof {cause}")

    proof = ModelProof(**result.fields["proof"])
    if result.fields["is_certain"]:
        _keep(file, proof)
    return proof


def _keep(file: Path, proof: ModelProof | RolloutProof) -> None:
    """Write a proof. Where that is not possible, it is done again the next time."""
    partial = file.with_suffix(f".{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(vars(proof)))
        partial.replace(file)


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "verl_ray" / "proofs"


def _key(settings: str, others: Iterable[str] = ()) -> str:
    versions = [_version(package) for package in (*_PACKAGES, *others)]
    # Kernels of states are asked where there is one.
    gpu = str(Path("/dev/nvidiactl").exists())
    parts = [settings, platform.machine(), gpu, str(_EDITION), *versions]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ------------------------------------------------------------------------- the process


def main(connection: socket.socket) -> None:
    """Prove a model in this process, for the one at the other end."""
    with modules_alone():
        run_trial(connection, _prove)


@contextlib.contextmanager
def modules_alone() -> Iterator[None]:
    """Let transformers import a model's code from a folder of this process alone.

    It imports a copy, which processes would share. Nothing of it may be imported yet.
    """
    with tempfile.TemporaryDirectory(prefix="verl_ray-modules-") as modules:
        os.environ["HF_MODULES_CACHE"] = modules
        yield


def _prove(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
    from verl_ray.errors import ModelError
    from verl_ray.models.conversions import checkpoint_names
    from verl_ray.models.parts import text_config
    from verl_ray.models.weights import expected_tensors
    from verl_ray.proofs.cut_model import model_on_meta
    from verl_ray.proofs.proof import config_of, prove

    try:
        config = config_of(fields["path"], trusts_code=fields["trusts_code"])
        result = prove(config, rollouts=False)
        tensors: Mapping[str, Sequence[int]] = {}
        passed_over: Sequence[str] = ()
        # A model that is refused may have tensors of which nothing is known.
        if result.engine.trains:
            whole = model_on_meta(text_config(config))
            tensors, passed_over = expected_tensors(whole, checkpoint_names(whole))
    except ModelError as error:
        # The machine, such as its memory, may be the cause.
        return {"proof": {"failure": str(error)}, "is_certain": False}
    engine = result.engine
    proof = {
        "packs_rows": result.packs_rows,
        "has_states": not engine.packs_rows,
        "has_values": engine.has_values,
        "has_adapters": engine.has_adapters,
        "has_balance": result.routers.return_choices,
        "has_biases": result.routers.have_biases,
        "tensors": tensors,
        "passed_over": passed_over,
        "failure": engine.failure,
    }
    numbers = [claim.number for claim in (*engine.claims, *result.border_claims)]
    return {"proof": proof, "is_certain": None not in numbers}
