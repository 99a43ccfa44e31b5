"""Reading checkpoints: every parameter is filled, and what does not fit is named."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from verl_ray.errors import ModelError
from verl_ray.hub.model_folders import INDEX
from verl_ray.models.names import CheckpointNames
from verl_ray.models.tensor_sources import CheckpointReader
from verl_ray.models.weights import fill, materialize, parameters_on_meta

NOTHING: frozenset[str] = frozenset()


NAMES = CheckpointNames()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2, bias=False)
        self.score = nn.Linear(2, 1, bias=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("derived", torch.zeros(2), persistent=False)


def tensors() -> dict[str, torch.Tensor]:
    return {
        "body.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "score.weight": torch.tensor([[5.0, 6.0]]),
        "kept": torch.tensor([7.0, 8.0]),
    }


def stored(found: dict[str, torch.Tensor]) -> CheckpointReader:
    with tempfile.TemporaryDirectory() as folder:
        save_file(found, Path(folder) / "model.safetensors")
        return CheckpointReader(folder)  # the files stay open


def test_a_directory_of_one_file_or_of_several_reads_alike(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    save_file(tensors(), one / "model.safetensors")
    places = {
        "body.weight": "a.safetensors",
        "kept": "a.safetensors",
        "score.weight": "b.safetensors",
    }
    for file in ("a.safetensors", "b.safetensors"):
        save_file(
            {name: tensors()[name] for name, place in places.items() if place == file},
            two / file,
        )
    save_file(
        {"stale": torch.zeros(1)}, two / "stale.safetensors"
    )  # not in the index: not read
    (two / INDEX).write_text(json.dumps({"weight_map": places}))
    for folder in (one, two):
        reader = CheckpointReader(str(folder))
        assert set(reader) == set(tensors()) and len(reader) == 3
        assert all(
            torch.equal(reader[name], value) for name, value in tensors().items()
        )


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model\.path: there is no directory .*nowhere"
    ):
        CheckpointReader(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"lacks any \.safetensors file"):
        CheckpointReader(str(tmp_path))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks gone\.safetensors"):
        CheckpointReader(str(tmp_path))


def test_every_parameter_and_persistent_buffer_is_filled() -> None:
    net = Net()
    fill(net, stored(tensors()), names=NAMES, new={}, unused=NOTHING, seed=0)
    assert net.body.weight.tolist() == [[1, 2], [3, 4]] and net.kept.tolist() == [7, 8]


def test_a_new_parameter_comes_from_its_name_and_the_seed_alone() -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 1, bias=False)

    def head(net: Net, seed: int, std: float = 1.0) -> torch.Tensor:
        checkpoint = {
            name: value for name, value in tensors().items() if name != "score.weight"
        }
        fill(
            net,
            stored(checkpoint),
            names=NAMES,
            new={"score.weight": std, "other.weight": 1.0},
            unused=NOTHING,
            seed=seed,
        )
        return net.score.weight.detach().clone()

    first = head(Net(), 0)
    torch.rand(3)  # whatever the process has drawn before
    assert torch.equal(first, head(Net(), 0))
    wider = Wider()
    assert torch.equal(first, head(wider, 0)) and not torch.equal(
        wider.other.weight, wider.score.weight
    )
    assert not torch.equal(first, head(Net(), 1))
    torch.testing.assert_close(head(Net(), 0, 0.02), first * 0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("body.weight"),
            r"does not fit Net: missing \['body.weight'\], unexpected none",
        ),
        (
            lambda t: t.update(extra=torch.zeros(1)),
            r"missing none, unexpected \['extra'\]",
        ),
        (
            lambda t: t.update({"body.weight": torch.zeros(3, 2)}),
            r"body.weight has shape \(3, 2\), expected \(2, 2\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message) -> None:
    found = tensors()
    change(found)
    with pytest.raises(ModelError, match=message):
        fill(Net(), stored(found), names=NAMES, new={}, unused=NOTHING, seed=0)


def test_what_may_be_left_aside_is() -> None:
    fill(
        Net(),
        stored(tensors() | {"lm_head": torch.zeros(1)}),
        names=NAMES,
        new={},
        unused=frozenset({"lm_head"}),
        seed=0,
    )


def test_a_tied_parameter_may_be_in_the_checkpoint_twice() -> None:
    net = Net()
    net.tied = net.body
    fill(
        net,
        stored(tensors() | {"tied.weight": torch.zeros(2, 2)}),
        names=NAMES,
        new={},
        unused=NOTHING,
        seed=0,
    )
    assert net.body.weight.tolist() == [[1, 2], [3, 4]]


def test_a_module_without_memory_is_filled_and_keeps_what_it_computed() -> None:
    class Ties(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2, bias=False)
            self.head.weight = self.body.weight
            self.derived += 3

    with parameters_on_meta():
        net = Ties()
    assert (
        all(parameter.is_meta for parameter in net.parameters())
        and net.head.weight is net.body.weight
    )
    assert net.derived.tolist() == [3, 3]
    assert not nn.Linear(1, 1).weight.is_meta  # nothing is left behind
    materialize(net, torch.device("cpu"))
    net.head.weight = net.body.weight
    fill(net, stored(tensors()), names=NAMES, new={}, unused=NOTHING, seed=0)
    assert net.head.weight.tolist() == [[1, 2], [3, 4]] and net.derived.tolist() == [
        3,
        3,
    ]


def test_layers_that_the_class_passes_over_may_be_in_the_checkpoint() -> None:
    net = Net()
    net._keys_to_ignore_on_load_unexpected = [r"^mtp\."]  # type: ignore[assignment]
    more = tensors() | {"mtp.weight": torch.zeros(1)}
    fill(net, stored(more), names=NAMES, new={}, unused=NOTHING, seed=0)
    with pytest.raises(ModelError, match=r"unexpected \['other'\]"):
        fill(
            net,
            stored(more | {"other": torch.zeros(1)}),
            names=NAMES,
            new={},
            unused=NOTHING,
            seed=0,
        )
