"""Loading a model for a role: refusals, and what a value model takes from a policy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from tests.models.loading import load_role_model
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ModelError
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.tiny import make_tiny
from verl_ray.settings.config_json import VALUE_HEAD

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    character_tokenizer(tmp_path / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_size=32, intermediate_size=48,
        tie_embeddings=False,
    )  # fmt: skip
    return make_tiny("qwen3", tmp_path / "model", tmp_path / "tokenizer", sizes, seed=0)


def edit(directory: Path, **settings: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_value_model_has_the_body_of_the_language_model_and_one_number_per_token(
    directory: Path,
) -> None:
    policy = load_role_model(str(directory), "policy", seed=0, device=CPU)
    value = load_role_model(str(directory), "value", seed=0, device=CPU)
    body, own = dict(policy.hf.named_parameters()), dict(value.hf.named_parameters())
    assert own.keys() - body.keys() == {VALUE_HEAD} and body.keys() - own.keys() == {
        "lm_head.weight"
    }
    assert all(torch.equal(body[name], own[name]) for name in body.keys() & own.keys())
    assert own[VALUE_HEAD].shape == (1, 32)
    assert len(value.layers) == 1


def test_every_parameter_is_float32_and_from_the_checkpoint(directory: Path) -> None:
    model = load_role_model(str(directory), "policy", seed=0, device=CPU)
    stored = CheckpointReader(str(directory))
    for name, parameter in model.hf.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, stored[name])


def test_code_of_a_model_is_neither_run_nor_asked_about(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "mine.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    )
    edit(directory, model_type="mine", auto_map={"AutoConfig": "mine.Mine"})
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ValueError, match="contains custom code"):
        CheckpointReader(str(directory)).config()
    assert not list(directory.glob("**/ran"))


def test_dropout_is_refused_by_name(directory: Path) -> None:
    edit(directory, attention_dropout=0.1)
    with pytest.raises(
        ModelError, match=r"sets \{'attention_dropout': 0.1\}; .* in config\.json"
    ):
        load_role_model(str(directory), "policy", seed=0, device=CPU)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no directory"):
        load_role_model(str(tmp_path / "nowhere"), "policy", seed=0, device=CPU)


def test_a_reward_model_keeps_its_head_and_a_language_model_is_none(
    directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelError, match=r"has no score\.weight: it is no reward model"
    ):
        load_role_model(str(directory), "value", seed=0, device=CPU, new_head=False)
    value = load_role_model(str(directory), "value", seed=5, device=CPU)
    value.hf.save_pretrained(tmp_path / "reward")
    again = load_role_model(
        str(tmp_path / "reward"), "value", seed=0, device=CPU, new_head=False
    )
    critic = load_role_model(str(tmp_path / "reward"), "value", seed=0, device=CPU)
    assert torch.equal(again.hf.score.weight, value.hf.score.weight)
    assert torch.equal(
        critic.hf.score.weight, value.hf.score.weight
    )  # a critic starts from a reward model's head


def test_a_head_of_several_labels_is_refused(directory: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=3
    ).save_pretrained(tmp_path / "three")
    for new_head in (False, True):  # as a reward model, and as a critic
        with pytest.raises(
            ModelError,
            match=r"three has 3 labels: its score\.weight gives 3 numbers .* with one label",
        ):
            load_role_model(
                str(tmp_path / "three"), "value", seed=0, device=CPU, new_head=new_head
            )


def test_the_head_counts_the_labels_and_the_config_need_not(
    directory: Path, tmp_path: Path
) -> None:
    one = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    one.save_pretrained(tmp_path / "one")
    path = tmp_path / "one" / "config.json"
    settings = {
        name: value
        for name, value in json.loads(path.read_text()).items()
        if "label" not in name
    }
    path.write_text(json.dumps(settings))
    value = load_role_model(
        str(tmp_path / "one"), "value", seed=0, device=CPU, new_head=False
    )
    assert torch.equal(value.hf.score.weight, one.score.weight)
    save_file(
        one.state_dict() | {"score.bias": torch.ones(1)},
        tmp_path / "one" / "model.safetensors",
    )
    with pytest.raises(
        ModelError, match=r"unexpected \['score\.bias'\]"
    ):  # transformers would leave it out
        load_role_model(
            str(tmp_path / "one"), "value", seed=0, device=CPU, new_head=False
        )
