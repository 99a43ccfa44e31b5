"""Models that megatron-core does not compute, or that do not fit a layout."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.command_line import main
from scripts.configuration import compose
from tests.engine import inputs
from tests.preflight.configs import BIG, NO_GAIN, ppo, problems_by_key
from tests.preflight.models import write_model
from verl_ray.backends.layouts import ModelSizes, Obstacle, model_obstacles
from verl_ray.backends.megatron import MegatronBackend
from verl_ray.backends.megatron_families import sizes_of, unsupported_settings
from verl_ray.preflight.findings import preflight

DENSE = {
    "model_type": "llama", "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "hidden_size": 192, "head_dim": 32, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 2048,
}  # fmt: skip
EXPERTS = DENSE | {
    "model_type": "qwen3_moe", "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
SUPERVISED = ["data.validation_path=null", "run.evaluate_every=0", "backend=megatron"]


def problems_of(directory: Path, data: Path, *overrides: str) -> dict[str, str]:
    """Return the problems of a supervised run on the directory, by key."""
    inputs = [
        f"model.path={directory}",
        f"data.train_path={data}/train.jsonl",
        *SUPERVISED,
    ]
    return problems_by_key(preflight(compose("sft", [*inputs, *overrides]), BIG))


def test_families_without_a_place_are_refused() -> None:
    assert list(unsupported_settings("models/olmo", {"model_type": "olmo2"})) == [
        (
            "models/olmo is a 'olmo2' model, which has no map to megatron-core's",
            "a model of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, gemma, gemma2, gemma3_text, "
            "deepseek_v2, deepseek_v3 or glm4_moe",
        )
    ]


def test_models_are_refused_for_the_roles_that_use_megatron(
    tmp_path: Path, model: Path, data: Path
) -> None:
    gemma = DENSE | {"model_type": "gemma"}
    biased = write_model(tmp_path / "biased", model, gemma | {"attention_bias": True})
    assert list(problems_of(biased, data)) == ["actor.backend"]
    assert not problems_of(biased, data, "backend@actor.backend=engine")
    for family in ("llama", "qwen2", "qwen3", "gemma"):
        assert not problems_of(
            write_model(tmp_path / family, model, DENSE | {"model_type": family}),
            data,
        )
    beside = ppo(biased, data, "backend=megatron", "backend@critic.backend=fsdp")
    assert list(problems_by_key(preflight(beside, BIG))) == [
        "actor.backend",
        "reference.backend",
    ]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (
            {"attention_bias": True},
            "sets attention_bias, for which megatron-core's model has no place",
        ),
        (
            {"mlp_bias": True},
            "sets mlp_bias, for which megatron-core's model has no place",
        ),
        (
            {"hidden_act": "prelu"},
            "sets hidden_act=prelu, whose weights have no place",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "has rotary positions of type longrope, and this backend computes default, linear, dynamic, llama3 or yarn",
        ),
    ],
)
def test_what_the_map_does_not_hold_is_refused(
    tmp_path: Path, model: Path, data: Path, settings: dict[str, object], rule: str
) -> None:
    directory = write_model(tmp_path / "model", model, DENSE | settings)
    messages = problems_of(directory, data)
    assert list(messages) == ["actor.backend"]
    assert messages["actor.backend"].startswith(f"{directory} {rule}")
    assert messages["actor.backend"].endswith(
        "| Choose backend@actor.backend=fsdp or backend@actor.backend=engine."
    )
    assert not problems_of(directory, data, "backend@actor.backend=fsdp")


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_bias": False, "mlp_bias": False, "hidden_act": "swish"},
        {
            "model_type": "qwen2",
            "attention_bias": True,
        },  # which no model of this family reads
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        {"hidden_act": "gelu"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_what_it_does_is_not(
    tmp_path: Path, model: Path, data: Path, settings: dict[str, object]
) -> None:
    assert not problems_of(
        write_model(tmp_path / "model", model, DENSE | settings), data
    )


def test_a_router_that_would_not_learn_is_refused(
    tmp_path: Path, model: Path, data: Path
) -> None:
    experts = write_model(
        tmp_path / "experts", model, EXPERTS | {"num_experts_per_tok": 1}
    )
    assert (
        "num_experts_per_tok=1 and its weights add up to 1: routers would never learn"
        in problems_of(experts, data)["actor.backend"]
    )
    assert not problems_of(
        write_model(
            experts,
            model,
            EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False},
        ),
        data,
    )


def test_a_layout_that_does_not_fit_the_model_names_one_that_does(
    tmp_path: Path, model: Path, data: Path
) -> None:
    directory = write_model(tmp_path / "model", model, DENSE)
    four = ("actor.num_ranks=4",)
    assert problems_of(directory, data, *four, "backend.tensor_parallel=4") == {
        "actor.backend.tensor_parallel": "it must divide the model's 6 attention heads and 2 key-value heads | "
        "The nearest layout that works has actor.backend.tensor_parallel=2."
    }
    assert problems_of(directory, data, *four, "backend.pipeline_parallel=4") == {
        "actor.backend.pipeline_parallel": "it must divide the model's 6 layers | "
        "The nearest layout that works has actor.backend.pipeline_parallel=2."
    }
    assert problems_of(
        directory,
        data,
        *four,
        "backend.pipeline_parallel=2",
        "backend.virtual_stages=2",
    ) == {
        "actor.backend.virtual_stages": "pipeline_parallel=2 times this must divide the model's 6 layers | "
        "The nearest layout that works has actor.backend.virtual_stages=3."
    }
    assert not problems_of(
        directory,
        data,
        *four,
        "backend.tensor_parallel=2",
        "backend.pipeline_parallel=2",
    )
    assert not problems_of(
        directory,
        data,
        "actor.num_ranks=6",
        "backend.tensor_parallel=2",
        "backend.context_parallel=3",
    )


def test_experts_have_a_layout_of_their_own(
    tmp_path: Path, model: Path, data: Path
) -> None:
    experts, dense = (
        write_model(tmp_path / "experts", model, EXPERTS),
        write_model(tmp_path / "dense", model, DENSE),
    )
    two = ("actor.num_ranks=2",)
    assert not problems_of(experts, data, *two, "backend.expert_parallel=2")
    assert problems_of(experts, data, *two, "backend.tensor_parallel=2") == {
        "actor.backend.sequence_parallel": "with tensor_parallel=2, megatron-core gives experts slices of the tokens "
        "alone | The nearest layout that works has actor.backend.sequence_parallel=true."
    }
    assert problems_of(experts, data, *two, "backend.context_parallel=2") == {
        "actor.backend.context_parallel": "the model has experts, whose balance is that of whole rows: rows cannot be cut | "
        "The nearest layout that works has actor.backend.context_parallel=1."
    }
    assert problems_of(dense, data, *two, "backend.expert_parallel=2") == {
        "actor.backend.expert_parallel": "this setting would be ignored: the model has no experts | "
        "The nearest layout that works has actor.backend.expert_parallel=1."
    }


def test_the_models_sizes_decide_what_is_nearest(
    tmp_path: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among divisors of 4 ranks, 4 is nearest to 3, but only 2 divides these heads.

    Both messages name 2.
    """
    directory = write_model(
        tmp_path / "model",
        model,
        DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2},
    )
    inputs = [
        f"model.path={directory}",
        f"data.train_path={data}/train.jsonl",
        *SUPERVISED,
    ]
    asked = [*inputs, "actor.num_ranks=4", "backend.tensor_parallel=3"]
    assert main(["check", "--config-name", "sft", *asked]) == 2
    err = capsys.readouterr().err
    assert (
        err.count("must divide num_ranks=4")
        == err.count("must divide the model's 4 attention heads")
        == 1
    )
    assert (
        err.count("The nearest layout that works has actor.backend.tensor_parallel=2.")
        == 2
    )
    assert "tensor_parallel=4" not in err


def test_the_model_that_a_run_makes_is_known_before_it_is_there(tmp_path: Path) -> None:
    sizes = [
        "prepare.model.num_heads=4",
        "prepare.model.num_kv_heads=2",
        "prepare.model.num_layers=3",
    ]
    run = [
        f"run.dir={tmp_path}/run",
        "backend=megatron",
        "actor.num_ranks=2",
        *sizes,
        NO_GAIN,
    ]
    assert not preflight(
        compose("quickstart", [*run, "backend.tensor_parallel=2"]), BIG
    ).problems
    messages = problems_by_key(
        preflight(
            compose("quickstart", [*run, "actor.backend.pipeline_parallel=2"]), BIG
        )
    )
    assert list(messages) == ["actor.backend.pipeline_parallel"]
    assert messages["actor.backend.pipeline_parallel"].startswith(
        "it must divide the model's 3 layers"
    )


def test_sizes_are_those_of_the_model_as_transformers_writes_it(tmp_path: Path) -> None:
    """`decoder_sparse_step` and `mlp_only_layers` decide which layers have experts."""
    from transformers import Qwen3MoeConfig

    def sizes(**settings: object) -> ModelSizes | None:
        Qwen3MoeConfig(
            num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=50, intermediate_size=64,
            moe_intermediate_size=16, num_experts=6, **settings,
        ).save_pretrained(tmp_path)  # fmt: skip
        return sizes_of(json.loads((tmp_path / "config.json").read_text()))

    everywhere = ModelSizes(
        layers=4,
        heads=8,
        key_heads=2,
        vocabulary=50,
        intermediate=None,
        experts=6,
        expert_intermediate=16,
    )
    assert sizes() == everywhere
    dense = ModelSizes(4, 8, 2, 50, 64)
    mixed = ModelSizes(4, 8, 2, 50, 64, 6, 16)
    assert (
        sizes(decoder_sparse_step=2)
        == sizes(decoder_sparse_step=2, mlp_only_layers=[3])
        == mixed
    )
    assert sizes(decoder_sparse_step=2, mlp_only_layers=[1, 3]) == dense
    assert sizes_of(
        {name: value for name, value in DENSE.items() if name != "num_key_value_heads"}
    ) == ModelSizes(layers=6, heads=6, key_heads=6, vocabulary=100, intermediate=96)
    for name in ("vocab_size", "model_type"):
        assert (
            sizes_of({key: value for key, value in DENSE.items() if key != name})
            is None
        )


def test_sizes_of_experts_follow_from_what_each_family_calls_them() -> None:
    mixtral = DENSE | {"model_type": "mixtral", "num_local_experts": 8}
    dense = ModelSizes(6, 6, 2, 100, 96)
    assert sizes_of(mixtral) == replace(
        dense, intermediate=None, experts=8, expert_intermediate=96
    )

    # Latent attention has as many heads of keys as of queries.
    deepseek = DENSE | {
        "model_type": "deepseek_v3", "n_routed_experts": 16, "moe_intermediate_size": 48, "first_k_dense_replace": 3,
    }  # fmt: skip
    latent = replace(dense, key_heads=6, latent=True)
    assert sizes_of(deepseek | {"n_shared_experts": 3}) == replace(
        latent, experts=16, expert_intermediate=48, shared_intermediate=144
    )
    no_experts = sizes_of(deepseek | {"first_k_dense_replace": 6})
    assert no_experts == latent

    backend = MegatronBackend(**inputs.MEGATRON | {"tensor_parallel": 2})
    uneven = replace(dense, shared_intermediate=49)
    assert [obstacle.rule for obstacle in model_obstacles(backend, uneven)] == [
        "it must divide the model's 49 numbers inside shared experts"
    ]
    (obstacle,) = model_obstacles(backend, latent)
    assert obstacle == Obstacle(
        "sequence_parallel",
        "with tensor_parallel=2, megatron-core gives latent attention slices of the tokens alone",
    )


@pytest.mark.parametrize(
    ("family", "settings", "setting"),
    [
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_a_family_has_no_place_for_is_refused(
    family: str, settings: dict[str, object], setting: str
) -> None:
    ((rule, _),) = unsupported_settings("m", {"model_type": family} | settings)
    assert rule.startswith(f"m sets {setting}")
    assert not list(unsupported_settings("m", {"model_type": family}))

    # A part of the head is rotated.
    yarn = {"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.5}}
    assert list(unsupported_settings("m", {"model_type": "glm4_moe"} | yarn))


def test_a_package_that_is_not_installed_is_named_with_its_remedy(
    tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "model", model, DENSE)
    monkeypatch.setitem(
        sys.modules, "megatron", None
    )  # as Python marks what is not there
    assert problems_of(directory, data) == {
        "actor.backend": "this backend needs megatron.core, not installed here | "
        "Install it: pip install 'verl_ray[megatron]'"
    }
    assert list(
        problems_by_key(preflight(ppo(model, data, "backend=megatron"), BIG))
    ) == ["actor.backend"]
    on_critic = ppo(model, data, "backend@critic.backend=megatron")
    assert list(problems_by_key(preflight(on_critic, BIG))) == ["critic.backend"]
    # A cluster has packages of its own.
    assert preflight(on_critic, None).problems == []
    assert not problems_of(directory, data, "backend@actor.backend=engine")
