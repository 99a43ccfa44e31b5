"""Requirements of a configuration, engines and backends on directories of models.

Invariant: no tensor is read, no hub is asked (`verl_ray/hub`), and torch is not needed.
Nothing is concluded from a file that is missing or damaged, which is reported once. A
refusal by a backend concerns a run that would fail after its processes have started, or
would compute something else. No package of a backend is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.backends import BACKENDS
from verl_ray.backends.base import ModelFacts, ModuleBackend
from verl_ray.config.reward import JudgeReward
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout import (
    ATTENTION_HEAD_SIZES,
    EXPERTS_HIDDEN_MULTIPLE,
    SILU_FAMILIES,
    RolloutEngineConfig,
    ServedModel,
)
from verl_ray.config.schema import Config, batch_algebra
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.versions import install_command, missing_packages
from verl_ray.data.tokenizers import VOCABULARY_FILES
from verl_ray.errors import Problem
from verl_ray.hub.model_folders import CODE, absent_weights, is_pending, needs_code
from verl_ray.models.names import TYPE_NAMES, matches
from verl_ray.paths import path_suggestion
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.model_files import (
    config_json,
    damaged_weights,
    has_experts,
    has_tokenizer,
    made_model,
    raw_config_json,
    settings_of,
    shapes_of,
    tensor_shapes,
    tensor_types,
    token_ids,
)
from verl_ray.preflight.model_proof import ModelProof, kept_rollout_proof, proof_of
from verl_ray.settings.config_json import (
    ACTIVATIONS,
    FAMILIES,
    LANGUAGE_HEAD,
    LANGUAGE_HEAD_BIAS,
    SELECTION_BIASES,
    VALUE_HEAD,
    chooses_experts,
    described_tensors,
    not_computed,
    positions_of,
    wrong_value,
)
from verl_ray.settings.hub_ids import is_hub_id
from verl_ray.settings.section import value_of
from verl_ray.shell import for_shell
from verl_ray.suggest import either, nearest_divisors

if TYPE_CHECKING:
    from verl_ray.models.role_model import HeadKind


def model_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield what the models of a run lack.

    These are files, positions, heads, a score, and a common vocabulary.

    Args:
        config: Configuration of the run.
        machine: Machine that the run is for; None if it is not known yet. For one that
            was described, config.json is all that must be here.
    """
    needs_files = machine is None or not machine.is_described
    for key, path in _model_paths(config).items():
        yield from _directory_problems(key, path, config, needs_files=needs_files)

    yield from _proof_problems(config)
    yield from _value_head_problems(config)
    yield from _expert_problems(config)
    yield from _adapter_problems(config)
    yield from _token_problems(config)
    yield from _top_problems(config)

    for engine in config.engines.values():
        yield from engine_problems(engine, machine)
    yield from judge_problems(config)


def _model_paths(config: Config) -> dict[str, str]:
    """Return the model directories that must exist, by the keys that name them."""
    is_made = config.preparation is not None
    roles: dict[str, ModelRole | JudgeReward] = {**config.model_roles, **config.judges}

    paths: dict[str, str] = {}
    for name, role in roles.items():
        path = role.model.folder
        if path != config.model.folder:
            paths[f"{name}.model.path"] = path
        elif not is_made:
            paths["model.path"] = path
    return paths


# ------------------------------------------------------------------------ one directory


def _directory_problems(
    key: str, path: str, config: Config, *, needs_files: bool
) -> Iterator[Problem]:
    """Yield what a model directory lacks."""
    # What the hub says about it is a problem already.
    if is_hub_id(path):
        return

    directory = Path(path)
    if not directory.is_dir():
        rule = "there is no such directory"
        fix = path_suggestion(
            directory,
            "Give a directory that `save_pretrained` wrote, or the id of a model on the"
            " hub (owner/name).",
        )
        yield Problem(key, path, rule, fix)
        return

    if not raw_config_json(path):
        yield Problem(key, path, *_no_model(directory))
        return

    role = key.removesuffix(".model.path")
    # vLLM computes a judge, and knows more families.
    is_judge = role in config.judges
    head = _head_of(path, config)
    yield from content_problems(
        key,
        path,
        head=head,
        is_judge=is_judge,
        needs_files=needs_files,
        trusts_code=config.trusts_code(path),
    )

    # A grader reads rows of its own tokenizer. Those that are too long get no score,
    # and are counted.
    if role not in config.graders:
        yield from _position_problems(key, path, config_json(path), config)


def _no_model(directory: Path) -> tuple[str, str]:
    """Return what a directory without config.json is, and what to do: rule and fix."""
    is_run = (directory / "checkpoints").is_dir()
    if is_run or (directory / "manifest.json").is_file():
        what = "the folder of a run" if is_run else "a checkpoint"
        command = for_shell(["verl-ray", "export", str(directory), "DIR"])
        fix = f"Write its model first: {command}."
        return f"this is {what}, which no model is loaded from", fix

    rule = "this directory has no readable config.json"
    return rule, "Give the directory that `save_pretrained` wrote."


def _head_of(path: str, config: Config) -> HeadKind:
    """Return the head of the model in a directory, which several roles may share."""
    heads = {
        config.head_of(name)
        for name, role in config.model_roles.items()
        if role.model.folder == path
    }
    return "value" if heads == {"value"} else "policy"


def _position_problems(
    key: str, path: str, settings: Mapping[str, object], config: Config
) -> Iterator[Problem]:
    """Yield a problem if rows may be longer than the model's positions."""
    longest = batch_algebra(config).max_row_tokens
    positions = positions_of(settings)
    if positions is None or longest <= positions:
        return

    rule = f"the model has {positions} positions, and a row may have {longest} tokens"
    excess = longest - positions
    tokens = value_of(config, config.length_key)
    if isinstance(tokens, int) and excess < tokens:
        advice = f"Lower {config.length_key} by {excess}"
    else:
        # The other part of the row is too long by itself.
        advice = f"Lower {config.longest_row[1]} to {positions} in all"
    fix = f"{advice}, or take another model."
    yield Problem(key, path, rule, fix)


# --------------------------------------------------------------------- roles and models


def _proof_problems(config: Config) -> Iterator[Problem]:
    """Yield uses of a model that its proof does not allow."""
    for name, role in config.model_roles.items():
        path = role.model.folder
        if made_model(path, config) or not config_json(path):
            continue

        trusts_code = config.trusts_code(path)
        proof = proof_of(path, trusts_code=trusts_code)
        key = f"{name}.model.path"
        shown = f"{_proof_command(path, trusts_code=trusts_code)} shows why."
        runs_code = trusts_code and CODE in raw_config_json(path)
        if runs_code and not isinstance(role.backend, ModuleBackend):
            rule = f"{name}.backend={role.backend.kind} runs no code of a model"
            kinds = [
                kind
                for kind, backend in BACKENDS.items()
                if issubclass(backend, ModuleBackend)
            ]
            fix = f"Choose {either(kinds)} as backend@{name}.backend."
            yield Problem(key, path, rule, fix)
        if config.head_of(name) == "value" and not proof.has_values:
            rule = "this model gives wrong numbers with a value head"
            yield Problem(key, path, rule, shown)
        if role.adapter is not None and not proof.has_adapters:
            rule = "this model gives wrong numbers with an adapter"
            yield Problem(f"{name}.lora.rank", role.adapter.rank, rule, shown)

        backend = role.backend
        if proof.has_states and backend.token_slices > 1:
            slices = f"{name}.backend.{backend.token_slices_key}"
            rule = f"the layers of {path} have states, so that rows cannot be cut"
            yield Problem(slices, backend.token_slices, rule, "Set it to 1.")

        if proof.packs_rows:
            continue
        if config.rows_per_unit > 1 and name in config.learners:
            rule = (
                "the rows of a pair are computed together, and this model computes rows"
                " of the same length alone"
            )
            yield Problem(key, path, rule, shown)
        judges_trajectories = (
            isinstance(config, RLConfig) and config.algorithm.sequence == "trajectory"
        )
        if judges_trajectories and name in config.learners:
            rule = (
                f"the rows of a trajectory are computed together, and {path} computes"
                " rows of the same length alone"
            )
            fix = f"Set it to row. {shown}"
            yield Problem("algorithm.sequence", "trajectory", rule, fix)


def _expert_problems(config: Config) -> Iterator[Problem]:
    """Yield settings for experts that a model does not have, or cannot obey."""
    for name, role in config.model_roles.items():
        path = role.model.folder
        settings = settings_of(path, config)
        if not settings or not isinstance(role, SupervisedRole):
            continue

        proof = functools.partial(proof_of, path, trusts_code=config.trusts_code(path))
        balance = role.expert_balance
        if balance is not None and not chooses_experts(settings):
            rule = f"this setting would be ignored: {path} has no experts"
            yield Problem(f"{name}.expert_balance", balance, rule, "Set it to null.")
        elif balance is not None and not proof().has_balance:
            rule = (
                f"the balance of the experts of {path} is not computed, since its"
                " routers return no choice"
            )
            yield Problem(f"{name}.expert_balance", balance, rule, "Set it to null.")

        if config.replays_routing(name):
            problem: str | None = None
            if not chooses_experts(settings):
                problem = f"this setting would be ignored: {path} has no experts"
            elif not proof().has_balance:
                problem = f"the routers of {path} return no choice that can be replayed"
            if problem is not None:
                key = "rollout.routing_replay"
                yield Problem(key, True, problem, "Set it to false.")

        rate = role.expert_bias_update
        reason = _why_biases_stay(path, role, settings, proof) if rate else None
        if reason is not None:
            yield Problem(f"{name}.expert_bias_update", rate, reason, "Set it to 0.")


def _why_biases_stay(
    path: str,
    role: SupervisedRole,
    settings: Mapping[str, object],
    proof: Callable[[], ModelProof],
) -> str | None:
    """Return why no bias of the choice of experts can be moved; None if one can."""
    if not chooses_experts(settings):
        return f"this setting would be ignored: {path} has no experts"
    tensors = tensor_shapes(path)
    if tensors and not any(name.endswith(SELECTION_BIASES) for name in tensors):
        return f"the routers of {path} have no biases"
    if not proof().has_biases:
        return (
            f"the routers of {path} have no biases that can be moved (those that are"
            " parameters stay as they are)"
        )
    if role.adapter is not None:
        return (
            f"the biases of {path} are weights of the base model, which stays as it is"
            " under an adapter"
        )
    if not role.backend.moves_expert_biases:
        return f"backend={role.backend.kind} does not move biases"
    return None


def _adapter_problems(config: Config) -> Iterator[Problem]:
    """Yield adapters on layers that their model does not have.

    An adapter needs a linear layer. Those of experts are slices of one tensor, and no
    layers; vLLM adapts them with kernels for GPUs alone (`lora/layers/fused_moe.py`).
    """
    for name, role in config.learners.items():
        if role.adapter is None:
            continue

        path = role.model.folder
        shapes = shapes_of(path, config)
        linear = {
            tensor.split(".")[-2]
            for tensor, shape in shapes.items()
            if ".layers." in tensor and ".experts." not in tensor and len(shape) == 2
        }
        # The router of experts is a matrix, and no layer that can be adapted.
        if has_experts(path):
            linear -= {"gate"}

        targets = role.lora.targets
        unknown = sorted(set(targets) - linear)
        if linear and unknown:
            rule = f"{', '.join(unknown)}: no linear layer of {path} has this name"
            if any(_names_experts(target, shapes) for target in unknown):
                rule += "; experts have no adapters here"
            fix = f"It has {', '.join(sorted(linear))}."
            yield Problem(f"{name}.lora.targets", list(targets), rule, fix)


def _names_experts(target: str, tensors: Iterable[str]) -> bool:
    """Whether a target is a part of the names of experts' tensors.

    They are apart (`experts.0.up_proj.weight`) or packed (`experts.gate_up_proj`).
    """
    return any(
        target in f"experts.{tensor.partition('.experts.')[2]}".split(".")
        for tensor in tensors
        if ".experts." in tensor
    )


def _value_head_problems(config: Config) -> Iterator[Problem]:
    """Yield models that must give one number per text and give none, or several.

    A critic, or a model that is to become a reward model, may have no head yet.
    """
    fix = (
        "Give a sequence-classification model with one label; `train --config-name"
        " reward_model` makes one."
    )
    for name, role in config.model_roles.items():
        if config.head_of(name) != "value":
            continue

        key = f"{name}.model.path"
        path = role.model.folder
        shapes = tensor_shapes(path)
        if VALUE_HEAD not in shapes:
            # Missing files are reported above. A model that the run itself makes has
            # no files yet, and no such head.
            is_checked = bool(shapes) or path == config.model.folder
            if role.scores_rollouts and is_checked:
                rule = f"this model has no {VALUE_HEAD}: it is no reward model"
                yield Problem(key, path, rule, fix)
            continue

        labels = shapes[VALUE_HEAD][0]
        if labels != 1:
            rule = (
                f"this model gives {labels} numbers per text (labels), and a score is"
                " one"
            )
            yield Problem(key, path, rule, fix)


def _top_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if more of a teacher's tokens are compared than there are."""
    if not isinstance(config, RLConfig) or config.distill is None:
        return
    num_tokens = len(token_ids(config.actor.model.folder))
    if num_tokens and config.distill.num_top > num_tokens:
        rule = f"the tokenizer of the actor has {num_tokens} tokens"
        fix = f"Use at most {num_tokens}."
        yield Problem("distill.top_k", config.distill.top_k, rule, fix)


def _token_problems(config: Config) -> Iterator[Problem]:
    """Yield models that read the actor's rows and number their tokens differently.

    A model that grades has a tokenizer of its own.
    """
    writer = config.evaluated_role
    writer_path = config.model_roles[writer].model.folder

    for name, role in config.model_roles.items():
        path = role.model.folder
        if path == writer_path or role.scores_rollouts:
            continue

        written = token_ids(writer_path)
        readable = token_ids(path)
        if written and readable and not written.items() <= readable.items():
            numbers = {number: token for token, number in readable.items()}
            differ = [
                f"{number} is {token!r}, and here {numbers.get(number)!r}"
                for token, number in sorted(written.items(), key=lambda item: item[1])
                if numbers.get(number) != token
            ]
            rule = (
                f"it reads rows in the {writer}'s tokens, and its tokenizer numbers"
                f" {len(differ)} of them otherwise: {'; '.join(differ[:3])}"
            )
            fix = (
                f"Give a model with the {writer}'s tokenizer, such as one that was"
                f" trained from the {writer}'s model."
            )
            yield Problem(f"{name}.model.path", path, rule, fix)


# ---------------------------------------------------- whether the files belong together


def content_problems(
    key: str,
    path: str,
    *,
    head: HeadKind,
    is_judge: bool,
    needs_files: bool = True,
    trusts_code: bool = False,
) -> Iterator[Problem]:
    """Yield what is wrong in a model directory that has a config.json.

    Args:
        key: Setting that names the directory.
        path: The directory.
        head: Head of the model in its role.
        is_judge: Whether vLLM alone loads the model, which knows more of them.
        needs_files: Whether weights and tokenizer must be here. Those that are here are
            looked at in any case.
        trusts_code: Whether code in the directory may run.
    """
    refusals = [
        *_setting_problems(key, path, is_judge=is_judge, trusts_code=trusts_code)
    ]
    yield from refusals
    is_proven = not refusals and not is_judge
    proof = proof_of(path, trusts_code=trusts_code) if is_proven else ModelProof()
    yield from _file_problems(
        key, path, proof, head=head, is_judge=is_judge, needs_files=needs_files
    )
    yield from _vocabulary_problems(key, path)


def _setting_problems(
    key: str, path: str, *, is_judge: bool, trusts_code: bool
) -> Iterator[Problem]:
    """Yield a problem if a model is not computed, or its config.json is wrong."""
    settings = raw_config_json(path)
    code_problem = _code_problem(key, path, settings, trusts_code=trusts_code)
    if code_problem is not None:
        yield code_problem
        return

    family = settings.get("model_type")
    if is_judge and isinstance(family, str) and family not in FAMILIES:
        return

    wrong = wrong_value(settings)
    if wrong is not None:
        rule = f"no model has the values of its config.json: {wrong}"
        yield Problem(key, path, rule, "Correct it there, or copy the model again.")
        return
    if is_judge:
        return

    reason = not_computed(settings)
    if reason is not None:
        rule = f"its config.json describes what is not computed here: {reason}"
        is_quantized = settings.get("quantization_config") is not None
        mend = "Save plain weights" if is_quantized else "Correct it there"
        yield Problem(key, path, rule, f"{mend}, or take another model.")
        return

    failure = proof_of(path, trusts_code=trusts_code).failure
    if failure is not None:
        rule = f"this is a {family!r} model, which is not computed here: {failure}"
        command = _proof_command(path, trusts_code=trusts_code)
        fix = f"{command} shows all; take another model."
        yield Problem(key, path, rule, fix)


def _code_problem(
    key: str, path: str, settings: Mapping[str, object], *, trusts_code: bool
) -> Problem | None:
    """Return what is wrong with the code of a model, if it needs any or it may run."""
    if not trusts_code:
        if not needs_code(settings):
            return None
        rule = f"{path} is computed by the code in it ({CODE}), which may not run"
        fix = "Read the code, and set it to true where you trust it."
        name = f"{key.removesuffix('.path')}.trust_remote_code"
        return Problem(name, False, rule, fix)

    # transformers writes OWNER/NAME--MODULE.CLASS.
    if "--" in str(settings.get(CODE)):
        rule = f"its {CODE} names code of another repository: {settings[CODE]}"
        fix = f"Copy that code into {path}, and take the repository out of {CODE}."
        return Problem(key, path, rule, fix)
    return None


def _proof_command(path: str, *, trusts_code: bool) -> str:
    option = ["--trust-remote-code"] if trusts_code else []
    return for_shell(["verl-ray", "prove", *option, path])


def _file_problems(
    key: str,
    path: str,
    proof: ModelProof,
    *,
    head: HeadKind,
    is_judge: bool,
    needs_files: bool,
) -> Iterator[Problem]:
    """Yield a problem if weights or tokenizer are missing, or of another model."""
    directory = Path(path)
    # Weights that the hub still has are looked at once they are here.
    are_pending = is_pending(path) or (not needs_files and absent_weights(path))
    if not are_pending and not any(directory.glob("*.safetensors")):
        rule = "this directory has no *.safetensors"
        yield Problem(key, path, rule, "Save the weights as safetensors.")

    damage = None if are_pending else damaged_weights(path)
    if damage is not None:
        rule = f"the weights cannot be loaded: {damage}"
        yield Problem(key, path, rule, "Copy or save the model again.")
        return

    shapes = tensor_shapes(path)
    if not are_pending and not shapes and any(directory.glob("*.safetensors")):
        rule = "none of its tensors has the name of a language model's"
        fix = "Give a model that generates text."
        yield Problem(key, path, rule, fix)
        return

    difference = _unexpected_tensor(
        config_json(path), shapes, proof, head=head, is_judge=is_judge
    )
    if difference is not None:
        rule = (
            "its tensors are not of the model that its config.json describes:"
            f" {difference}"
        )
        fix = (
            "Give the directory that `save_pretrained` wrote, with nothing of another"
            " model in it."
        )
        yield Problem(key, path, rule, fix)

    if needs_files and not has_tokenizer(path):
        rule = "this directory has no tokenizer"
        fix = f"Put the model's tokenizer beside it ({either(VOCABULARY_FILES)})."
        yield Problem(key, path, rule, fix)

    foreign_types = sorted(tensor_types(path).difference(TYPE_NAMES))
    if foreign_types and not is_judge:
        rule = f"its weights are of type {foreign_types[0]}, which is not read"
        fix = f"Save them as one of {either(tuple(TYPE_NAMES.values()))}."
        yield Problem(key, path, rule, fix)


def _vocabulary_problems(key: str, path: str) -> Iterator[Problem]:
    """Yield a problem if the tokenizer has tokens that the model has no number for."""
    embedded = config_json(path).get("vocab_size")
    ids = token_ids(path)
    if not ids or not isinstance(embedded, int):
        return

    last = max(ids, key=ids.__getitem__)
    if ids[last] >= embedded:
        rule = (
            f"its tokenizer has token {ids[last]} ({last!r}), and the model has"
            f" {embedded} tokens (vocab_size)"
        )
        fix = "Give the tokenizer that the model was trained with."
        yield Problem(key, path, rule, fix)


def _unexpected_tensor(
    settings: Mapping[str, object],
    shapes: Mapping[str, list[int]],
    proof: ModelProof,
    *,
    head: HeadKind,
    is_judge: bool,
) -> str | None:
    """Return how a tensor differs from what config.json describes; None if none does.

    Args:
        settings: Contents of config.json.
        shapes: Shape of each tensor by its name; empty where no weights are here.
        proof: The proof of the model, which knows the tensors of any family.
        head: Head of the model in its role.
        is_judge: Whether vLLM alone loads the model, which passes over other tensors.
    """
    # Quantized weights have tensors of other names and shapes.
    if settings.get("quantization_config") is not None or not shapes:
        return None

    described = dict(described_tensors(settings)) or proof.tensors
    for name, shape in described.items():
        # A new head takes the place of a language head.
        if name in (LANGUAGE_HEAD, LANGUAGE_HEAD_BIAS) and head == "value":
            continue
        actual = shapes.get(name)
        if actual != shape:
            is_now = "is absent" if actual is None else f"has shape {actual}"
            return f"{name} {is_now}, and would have shape {shape}"

    # A checkpoint may hold the head that is tied to the embeddings.
    others = shapes.keys() - described.keys() - {LANGUAGE_HEAD}
    if head == "value":
        others -= {LANGUAGE_HEAD_BIAS, VALUE_HEAD}
    unread = sorted(name for name in others if not matches(proof.passed_over, name))
    # The tensors of some models are not known here.
    if not unread or is_judge or not described:
        return None
    return f"{unread[0]} has shape {shapes[unread[0]]}, and would be absent"


# ----------------------------------------------------------------- engines and backends


def engine_problems(engine: ServedModel, machine: Machine | None) -> Iterator[Problem]:
    """Yield reasons why an engine cannot serve its model.

    Args:
        engine: Engine and its model.
        machine: Machine that the engine runs on; None if it is not known yet.
    """
    settings = config_json(engine.path)
    heads = settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    if not isinstance(heads, int) or not heads or not isinstance(hidden, int):
        return

    # Each rank computes whole attention heads.
    parallel = engine.config.tensor_parallel
    if heads % parallel:
        key = f"{engine.section}.tensor_parallel"
        rule = f"it must divide the {heads} attention heads of the model"
        nearest = either(nearest_divisors(heads, parallel))
        yield Problem(key, parallel, rule, f"The nearest that do are {nearest}.")

    yield from _stage_problems(engine, settings)
    yield from _cache_problems(engine, settings)

    activation = settings.get("hidden_act", "silu")
    others = [name for name in ACTIVATIONS if name != "silu"]
    if settings.get("model_type") in SILU_FAMILIES and activation in others:
        rule = f"its hidden_act is {activation}, and the rollout engine computes silu"
        yield Problem(engine.key, engine.path, rule, "Take a model with silu.")

    if machine is None or machine.gpus:
        return

    yield from _agreement_problems(engine)
    quantization = engine.config.quantization
    if quantization is not None and has_experts(engine.path):
        rule = "vLLM quantizes no experts on a CPU, and the model has some"
        key = f"{engine.section}.quantization"
        yield Problem(key, quantization, rule, "Use null, or a GPU.")

    # vLLM's kernels for CPUs are written for some sizes only.
    if hidden % EXPERTS_HIDDEN_MULTIPLE and has_experts(engine.path):
        rule = (
            f"the model's hidden size is {hidden}, which the rollout engine's experts"
            " do not take on a CPU"
        )
        fix = (
            f"Take a multiple of {EXPERTS_HIDDEN_MULTIPLE}, or a GPU; supervised runs"
            " train this one on a CPU, too."
        )
        yield Problem(engine.key, engine.path, rule, fix)

    head_size = settings.get("head_dim") or hidden // heads
    if head_size not in ATTENTION_HEAD_SIZES:
        rule = (
            f"the model's head size is {head_size}, which the rollout engine's"
            " attention does not take on a CPU"
        )
        fix = f"Take one of {either(ATTENTION_HEAD_SIZES)}."
        yield Problem(engine.key, engine.path, rule, fix)


def _stage_problems(
    engine: ServedModel, settings: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield stages without a layer, and ranks for experts that there are none of."""
    layers = settings.get("num_hidden_layers")
    stages = engine.config.pipeline_parallel
    if isinstance(layers, int) and stages > layers:
        key = f"{engine.section}.pipeline_parallel"
        rule = f"the model has {layers} layers, and each stage has one at least"
        yield Problem(key, stages, rule, f"Use at most {layers}.")

    if engine.config.expert_parallel and not chooses_experts(settings):
        key = f"{engine.section}.expert_parallel"
        rule = f"this setting would be ignored: {engine.path} has no experts"
        yield Problem(key, True, rule, "Use false.")


def _agreement_problems(engine: ServedModel) -> Iterator[Problem]:
    """Yield settings with which vLLM is known to differ from a trainer.

    A judge is compared with no trainer.
    """
    proof = kept_rollout_proof(engine.path, trusts_code=engine.trusts_code)
    if engine.section != "rollout" or proof is None:
        return

    shown = f"{_proof_command(engine.path, trusts_code=engine.trusts_code)} shows it."
    if proof.model_impl is None:
        rule = "vLLM computes this model otherwise than its family does"
        fix = f"Train it without rollouts, or take another model. {shown}"
        yield Problem(engine.key, engine.path, rule, fix)
        return

    model_impl = engine.config.vllm_args.get("model_impl", "auto")
    if proof.model_impl != "auto" and model_impl != proof.model_impl:
        key = f"{engine.section}.vllm_args.model_impl"
        rule = "vLLM's own class computes this model otherwise than its family does"
        yield Problem(key, model_impl, rule, f"Set it to {proof.model_impl}. {shown}")
    dtype = engine.config.dtype
    if proof.dtype != "float32" and dtype != proof.dtype:
        key = f"{engine.section}.dtype"
        rule = f"vLLM computes this model on a CPU in {proof.dtype} alone"
        yield Problem(key, dtype, rule, f"Set it to {proof.dtype}. {shown}")


def _cache_problems(
    engine: ServedModel, settings: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a KV cache that cannot hold one row of the greatest length."""
    # On a cluster of which nothing is known yet, auto may become anything.
    needed = row_cache_bytes(engine, settings)
    cache_gib = engine.config.kv_cache_gib
    if needed is None or cache_gib == "auto" or needed <= cache_gib * GIB:
        return

    tokens = engine.max_prompt_tokens + engine.max_response_tokens
    rule = f"one row of {tokens} tokens needs {needed / GIB:.3g} GiB of it"
    ways = ["shorter rows"]
    if engine.config.dtype == "float32":
        ways.append(f"{engine.section}.dtype=bfloat16")
    fix = f"Give more than that, for several rows at a time; or {either(ways)}."
    yield Problem(f"{engine.section}.kv_cache_gib", cache_gib, rule, fix)


def row_cache_bytes(engine: ServedModel, settings: Mapping[str, object]) -> int | None:
    """Return the KV cache that one row of the greatest length needs on a rank.

    vLLM needs a little more, since it counts in blocks.

    Args:
        engine: The engine.
        settings: Contents of its model's config.json.

    Returns:
        The bytes; None if they are not known.
    """
    layers = settings.get("num_hidden_layers")
    heads = settings.get("num_attention_heads")
    hidden = settings.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int) and heads):
        return None
    if not isinstance(hidden, int) or "kv_cache_dtype" in engine.config.vllm_args:
        return None
    # Layers with a window keep fewer tokens.
    layer_types = settings.get("layer_types")
    if isinstance(layer_types, list) and set(layer_types) != {"full_attention"}:
        return None

    kv_heads = settings.get("num_key_value_heads") or heads
    head_size = settings.get("head_dim") or hidden // heads
    assert isinstance(kv_heads, int) and isinstance(head_size, int)

    tokens = engine.max_prompt_tokens + engine.max_response_tokens
    return tokens * cache_bytes_per_token(engine.config, layers, kv_heads, head_size)


def cache_bytes_per_token(
    engine: RolloutEngineConfig, layers: int, kv_heads: int, head_size: int
) -> int:
    """Return the bytes of a token in the KV cache of a rank.

    Every layer has a key and a value per head. A type that is `auto` counts as the
    narrower one.

    Args:
        engine: Settings of the engine.
        layers: Layers of its model.
        kv_heads: Heads of keys and values of each layer, over all ranks.
        head_size: Size of a head.
    """
    heads_per_rank = max(1, kv_heads // engine.tensor_parallel)
    element_bytes = 4 if engine.dtype == "float32" else 2
    layers = -(-layers // engine.pipeline_parallel)
    return 2 * layers * heads_per_rank * head_size * element_bytes


def judge_problems(config: Config) -> Iterator[Problem]:
    """Yield judges whose question and reply do not fit their model."""
    for name, judge in config.judges.items():
        longest = judge.max_prompt_tokens + judge.max_response_tokens
        positions = positions_of(config_json(judge.model.folder), trained=False)
        if positions is None or longest <= positions:
            continue

        key = f"{name}.max_prompt_tokens"
        rule = (
            f"the judge has {positions} positions, and question and answer may have"
            f" {longest} tokens"
        )
        fix = (
            f"Lower it or {name}.max_response_tokens by {longest - positions} in all,"
            " or take another judge."
        )
        yield Problem(key, judge.max_prompt_tokens, rule, fix)


# ----------------------------------------------------------------------------- backends


def backend_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield missing packages, and models that their backend cannot compute.

    Args:
        config: Configuration of the run.
        machine: Machine that must have the packages, which are checked on this one
            alone. None stands for another cluster.
    """
    # The packages of other machines cannot be seen from here.
    if machine is not None and not machine.is_described:
        yield from _package_problems(config)

    for name, role in config.model_roles.items():
        path = role.model.folder
        model = ModelFacts(
            path=path,
            settings=settings_of(path, config),
            tensors=shapes_of(path, config),
            has_value_head=config.head_of(name) == "value",
        )
        yield from role.backend.model_problems(name, role.num_ranks, model)


def _package_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each backend whose packages are missing.

    A backend that several roles use is reported once, for the first of them.
    """
    reported: set[str] = set()
    for name, role in config.model_roles.items():
        backend = role.backend
        missing = missing_packages(backend.packages)
        if not missing or backend.kind in reported:
            continue

        reported.add(backend.kind)
        rule = f"this backend needs {' and '.join(missing)}, not installed here"
        fix = f"Install it: {install_command(backend.extra)}"
        yield Problem(f"{name}.backend", backend.kind, rule, fix)
