"""Small models, their weights on a wire, and vLLM engines that leave no trace.

A vLLM engine of these fixtures leaves the process as it was.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.vllm_process import ready_for_vllm
from tests.weight_sync.fingerprints import EMPTY
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import RolloutConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.tiny import Architecture, make_tiny
from verl_ray.rollout import vllm_engine
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.vllm_arguments import engine_config
from verl_ray.rollout.vllm_engine import VllmEngine
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice, plan_buckets
from verl_ray.weight_sync.shared_memory import create, map_slots, remove
from verl_ray.weight_sync.transport import WireSpec

MAX_MODEL_LEN = 96

ModelMaker = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    def make(architecture: Architecture, *, tie: bool, seed: int = 0) -> Path:
        folder = tmp_path_factory.mktemp(f"{architecture}-{tie}-{seed}")
        character_tokenizer(folder / "tokenizer", "0123456789+= ")
        config = TinyModelConfig(
            hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=192,
            tie_embeddings=tie,
        )  # fmt: skip
        return make_tiny(
            architecture, folder / "model", folder / "tokenizer", config, seed
        )

    return make


@pytest.fixture(scope="session")
def rollout_config() -> Callable[..., RolloutConfig]:
    def config(**changes: object) -> RolloutConfig:
        values: dict[str, object] = {
            "group_size": 2, "max_response_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": [], "routing_replay": False,
            "num_replicas": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": False, "dtype": "float32", "quantization": None, "kv_cache_gib": 0.03125, "stream_rows": 1,
            "sleep": "never", "vllm_args": {}, "schedule": "synchronous", "staleness": 0, "updates": "between",
            "kv": None, "concurrency": 64,
            "sync": {
                "transport": "shared_memory", "bucket_mib": 1, "delta": False, "folder": "unused", "adapter": "merged",
                "probe_every": 1, "probe_tolerance": 1e-3,
            },
            "health": {"interval_s": 5.0, "deadline_s": 30.0},
            "endpoint": {"enabled": False, "host": "127.0.0.1", "port": 0, "in_flight": 1, "token_env": None},
        }  # fmt: skip
        return RolloutConfig.model_validate(values | changes)

    return config


EngineStarter = Callable[..., VllmEngine]


def _asynchronous_config(*arguments: Any, **options: Any) -> Any:
    """Return the configuration of an engine that schedules as it does on a GPU.

    vLLM turns this off on a CPU, where it would gain nothing.
    """
    config = engine_config(*arguments, **options)
    config.scheduler_config.async_scheduling = True
    return config


@pytest.fixture(scope="module")
def start_vllm(rollout_config: Callable[..., RolloutConfig]) -> Iterator[EngineStarter]:
    """Start engines in this process, one at a time, and close them after the module."""
    started: list[VllmEngine] = []

    def start(
        model: Path,
        *,
        initial_version: int | None = None,
        lora: LoraConfig | None = None,
        asynchronous: bool = False,
        max_model_len: int = MAX_MODEL_LEN,
        **changes: object,
    ) -> VllmEngine:
        while started:
            started.pop().close()
        with pytest.MonkeyPatch.context() as patch:
            if asynchronous:
                patch.setattr(vllm_engine, "engine_config", _asynchronous_config)
            config = rollout_config(**changes)
            engine = VllmEngine(
                str(model), config, max_model_len=max_model_len, seed=0, device="cpu",
                initial_version=initial_version, lora=lora, records_routing=config.routing_replay,
            )  # fmt: skip
        started.append(engine)
        return engine

    with ready_for_vllm():
        yield start
        while started:
            started.pop().close()


def manifest_of(model: PreTrainedModel) -> Manifest:
    names = checkpoint_names(model)
    owners: dict[int, str] = {}
    parameters = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner = owners.setdefault(id(tensor), name)
        tied_to, dtype = (
            None if owner == name else owner,
            str(tensor.dtype).removeprefix("torch."),
        )
        parameters += [
            Parameter(piece.name, piece.shape, dtype, tied_to)
            for piece in names.tensors(name, tensor.shape)
        ]
    return Manifest(tuple(parameters))


def checkpoint_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors that `manifest_of` names."""
    names = checkpoint_names(model)
    return {
        piece.name: tensor[
            tuple(map(slice, piece.start, np.add(piece.start, piece.sides)))
        ].reshape(piece.shape)
        for name, tensor in model.state_dict().items()
        for piece in names.tensors(name, tensor.shape)
    }


@pytest.fixture(scope="session")
def reload_as_vllm_does() -> Callable[[VllmEngine, PreTrainedModel], None]:
    """Load a model's weights into a running engine by vLLM's own means.

    What the project's loader corrects is left out.
    """

    def reload(engine: VllmEngine, model: PreTrainedModel) -> None:
        state = checkpoint_of(model)
        weights = [
            (parameter.name, state[parameter.name])
            for parameter in manifest_of(model).sent
        ]
        engine.core.call_workers("reload_weights", iter(weights))
        engine.core.give_up_kv_cache()

    return reload


Publish = Callable[..., dict[str, Fingerprint]]


@pytest.fixture(scope="session")
def publish() -> Publish:
    """Send a model's weights as two ranks would, in buckets that split layers.

    Each rank sends its half of the rows.
    """

    def send(
        engine: RolloutEngine,
        model: PreTrainedModel,
        version: int,
        *,
        verification_follows: bool = False,
    ) -> dict[str, Fingerprint]:
        manifest, state = manifest_of(model), checkpoint_of(model)
        buckets = plan_buckets(manifest, 100_000)
        assert len(buckets) > 4
        address = create("rollout-test", max(bucket.nbytes for bucket in buckets))
        transport, sent = map_slots(address), dict[str, Fingerprint]()
        engine.connect(address, WireSpec(buckets, receivers=1, patience_s=60), 0)
        engine.begin_update(manifest, version)
        for bucket in buckets:
            for rank in range(2):
                shards = []
                for entry in bucket.entries:
                    tensor, half = (
                        state[entry.parameter.name],
                        entry.parameter.shape[0] // 2,
                    )
                    part = tensor[:half] if rank == 0 else tensor[half:]
                    start = (0 if rank == 0 else half, *[0] * (tensor.dim() - 1))
                    shards.append(
                        (Slice(entry.parameter.name, start, tuple(part.shape)), part)
                    )
                for name, found in transport.fill(bucket, shards).by_name.items():
                    sent[name] = sent.get(name, EMPTY) + found
            engine.receive(bucket)
        remove(address)
        return engine.commit(sent, verification_follows=verification_follows).by_name

    return send


def receive_without(
    engine: RolloutEngine, model: PreTrainedModel, left_out: str
) -> dict[str, Fingerprint]:
    """Let an engine receive all tensors of a model but one, in one bucket."""
    state = checkpoint_of(model)
    manifest = Manifest(
        tuple(each for each in manifest_of(model).parameters if each.name != left_out)
    )
    (bucket,) = plan_buckets(manifest, 1 << 30)
    address = create("partial", bucket.nbytes)
    shards = [
        (
            Slice(each.parameter.name, (0,) * len(each.parameter.shape), each.parameter.shape),
            state[each.parameter.name],
        )
        for each in bucket.entries
    ]  # fmt: skip
    sent = map_slots(address).fill(bucket, shards).by_name
    engine.connect(address, WireSpec((bucket,), receivers=1, patience_s=60), 0)
    engine.begin_update(manifest, 1)
    engine.receive(bucket)
    remove(address)
    return sent


LogProbs = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def reference_log_probs() -> LogProbs:
    """Log-probs of a response by transformers, float32 [response tokens]."""

    def log_probs(
        model: PreTrainedModel,
        prompt: np.ndarray,
        response: np.ndarray,
        temperature: float = 1.0,
    ):
        row = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        with torch.no_grad():
            logits = model(row).logits[0, len(prompt) - 1 : -1].float() / temperature
        picked = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])
        return picked[:, 0].numpy()

    return log_probs


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path], PreTrainedModel]:
    return lambda path: AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32
    )
