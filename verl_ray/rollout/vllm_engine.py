"""vLLM as a rollout engine: its engine core, stepped in this process, on GPU or CPU.

Invariant: token ids go in, and token ids come out. A response depends on the request
alone (prompt, sampling, seed) and on the policy version; on a GPU this is not verified
yet. No sampling setting comes from the model directory. vLLM's request front-end
(tokenizer, incremental text, dictionaries of log-probs) is left out: requests go to the
engine core, and tokens come from it.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.data.tokenizers import end_tokens, load_tokenizer
from verl_ray.errors import RolloutError, VerlRayError, WeightSyncError
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.rollout.requests import (
    EngineLoad,
    Float32,
    GenerationProgress,
    GenerationRequest,
    Sampling,
    Tokens,
)
from verl_ray.rollout.vllm_arguments import engine_config
from verl_ray.rollout.vllm_core import (
    VllmCore,
    require_routing,
    require_supported,
)
from verl_ray.rollout.vllm_outputs import progress_of, prompt_log_probs_of
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Experts, Manifest
from verl_ray.weight_sync.transport import Address, WireSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.config import VllmConfig


_CACHED_SAMPLINGS = 1024
_PROBE_PREFIX = "probe-"


class VllmEngine(RolloutEngine):
    """A rollout engine that runs vLLM.

    Attributes:
        core: vLLM's engine core.
    """

    # Whether requests use the adapter, and whether the open update holds one.
    _adapted = False
    _holds_adapter = False

    def __init__(
        self,
        model_path: str,
        config: RolloutEngineConfig,
        *,
        max_model_len: int,
        seed: int,
        device: str,
        initial_version: int | None = None,
        sleeps: bool = True,
        lora: LoraConfig | None = None,
        chat_template: str | None = None,
        trusts_code: bool = False,
        records_routing: bool = False,
    ) -> None:
        """Start vLLM on a local model directory.

        Args:
            model_path: The model directory, with a config.json.
            config: Settings of the engine.
            max_model_len: Largest number of tokens of prompt and response together.
            seed: Seed of vLLM; requests have seeds of their own.
            device: "cpu" or "cuda". The process must have been started with
                `environment(device, ...)`.
            initial_version: The policy version of the model directory. With None its
                weights are not read, and an update must transfer weights first.
            sleeps: Whether the engine will free memory; vLLM must know it on a GPU.
            lora: The adapter that updates will transfer in addition to the model.
            chat_template: Replaces the model's, which tells how responses end.
            trusts_code: Whether the code in the directory may run.
            records_routing: Whether chunks have the experts that routers chose.

        Raises:
            RolloutError: vLLM cannot run this; the error names the key to change.
        """
        super().__init__(initial_version)
        _require_environment()
        _require_model(model_path)
        require_supported()

        self._max_model_len = max_model_len
        self._has_processes = config.ranks_per_replica > 1
        self._lora = lora
        # Number of committed updates. Prefixes are cached per number, so that no
        # request reads what other weights have computed.
        self._num_loads = 0

        make_config = functools.partial(
            engine_config, model_path, config, max_model_len, seed, device,
            without_weights=initial_version is None, sleeps=sleeps, lora=lora,
            trusts_code=trusts_code, records_routing=records_routing,
        )  # fmt: skip
        self._start_core(
            model_path, device, make_config, chat_template, records_routing
        )

        # Making vLLM's parameters takes long, and most requests sample in the same way.
        cache = functools.lru_cache(_CACHED_SAMPLINGS)
        self._sampling_params = cache(self._make_sampling_params)

    def _start_core(
        self,
        model_path: str,
        device: str,
        make_config: Callable[[], VllmConfig],
        chat_template: str | None,
        records_routing: bool,
    ) -> None:
        if records_routing:
            require_routing(device)
        try:
            vllm_config = make_config()
            self._tokenizer = load_tokenizer(model_path, chat_template)
            self._end_tokens = end_tokens(self._tokenizer)
            self._vocabulary = int(vllm_config.model_config.get_vocab_size())
            # On a GPU vLLM's own outputs have it.
            takes_routing = records_routing and device == "cpu"
            self.core = VllmCore(vllm_config, takes_routing=takes_routing)
            if records_routing:
                model = vllm_config.model_config
                top_k = model.get_num_experts_per_tok()
                self.routing_shape = model.get_total_num_hidden_layers(), top_k
        except VerlRayError:
            raise
        except Exception as error:
            # vLLM raises whatever goes wrong, with messages that name its own settings.
            raise RolloutError(
                f"vLLM did not start on {model_path} ({device}): {error}"
            ) from error

        self._can_sleep = device == "cpu" or vllm_config.model_config.enable_sleep_mode
        # They do not change, and cannot be read while the weights are asleep.
        self._experts: list[Experts] = self.core.call_workers("weights_experts")

    @property
    def memory_bytes(self) -> int:
        # Ranks may share a process, which counts once.
        bytes_by_process = dict(self.core.call_workers("memory_in_use"))
        return sum(bytes_by_process.values())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self._end_tokens

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def load(self) -> EngineLoad:
        return self.core.load

    # ----------------------------------------------------------------------- generation

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        # All requests are checked before the first is queued, so that a refusal leaves
        # none of them in vLLM.
        prepared = []
        for request in requests:
            self._check(request)
            scores_prompt = request.scores_prompt
            # Few requests have the same grammar, and each may be large.
            is_usual = request.sampling.grammar is None
            make = self._sampling_params if is_usual else self._make_sampling_params
            params = copy.copy(make(request.sampling, scores_prompt))
            params.seed = request.seed
            prepared.append((request, params))

        for request, params in prepared:
            self.core.add(
                str(request.request_id),
                request.tokens.tolist(),
                params,
                cache_salt=str(self._num_loads),
                session=request.session,
                adapted=self._adapted,
            )

    def _check(self, request: GenerationRequest) -> None:
        """Raise `RolloutError` for a request that is too long or has unknown tokens."""
        total = len(request.tokens) + request.sampling.max_tokens
        if total > self._max_model_len:
            raise RolloutError(
                f"request {request.request_id}: {len(request.tokens)} prompt tokens and"
                f" up to {request.sampling.max_tokens} response tokens are more than"
                f" the engine's {self._max_model_len}; lower data.max_prompt_tokens or"
                " rollout.max_response_tokens"
            )

        # A token outside of the vocabulary would fail the engine, with all requests.
        least = int(request.tokens.min())
        most = int(request.tokens.max())
        if least < 0 or most >= self._vocabulary:
            raise RolloutError(
                f"request {request.request_id}: found the token ids {least} to {most},"
                f" expected 0 to {self._vocabulary - 1}, the vocabulary of the model"
            )

    def _make_sampling_params(
        self, sampling: Sampling, scores_prompt: bool
    ) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        grammar = sampling.grammar
        structured_outputs = None
        if grammar is not None:
            self.core.prepare_grammars(self._tokenizer)
            structured_outputs = StructuredOutputsParams(structural_tag=grammar)

        if sampling.temperature and not 0.01 <= sampling.temperature <= 2:
            raise RolloutError(
                f"rollout.temperature = {sampling.temperature}: vLLM samples at 0"
                " (greedy) or from 0.01 to 2"
            )

        stop_token_ids = sampling.stop_token_ids
        if stop_token_ids is None:
            stop_token_ids = self._end_tokens
        try:
            return SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(stop_token_ids),
                # Log-probs of the sampled tokens and of no others.
                logprobs=0,
                # Those of the prompt's tokens and of the likeliest in their places.
                prompt_logprobs=1 if scores_prompt else None,
                structured_outputs=structured_outputs,
                detokenize=False,
            )
        except ValueError as error:
            raise RolloutError(f"vLLM refuses {sampling}: {error}") from error

    def _step(self) -> Iterator[GenerationProgress]:
        yield from map(progress_of, self.core.step())

    def _abort(self, request_ids: Sequence[int]) -> None:
        self.core.abort([str(request_id) for request_id in request_ids])

    def _pause(self) -> list[GenerationProgress]:
        return [progress_of(output) for output in self.core.pause()]

    def _give_up_kv_cache(self) -> None:
        self.core.give_up_kv_cache()

    def _resume(self) -> None:
        self.core.resume()

    # --------------------------------------------------------------------------- memory

    def _sleep(self, parts: frozenset[EngineMemoryPart]) -> None:
        if not self._can_sleep:
            raise RolloutError(
                "the rollout engine was started with rollout.sleep = never and cannot"
                " sleep"
            )
        if "weights" in parts:
            self.core.free_everything()
        else:
            self.core.free_kv_cache()

    def _wake(self, part: EngineMemoryPart) -> None:
        self.core.wake(part)

    # -------------------------------------------------------------------------- weights

    @property
    def experts(self) -> list[Experts]:
        return self._experts

    def _connect(
        self, address: Address, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        self.core.call_workers("weights_connect", address, wire_spec, first_receiver)

    def _begin_update(self, manifest: Manifest) -> None:
        self._holds_adapter = bool(manifest.adapter.parameters)
        if self._holds_adapter and self._lora is None:
            raise WeightSyncError(
                "an adapter is sent, and the engine was started for a model without one"
            )
        # vLLM's requests have an adapter or none from their beginning.
        if self._in_flight and self._holds_adapter != self._adapted:
            raise WeightSyncError(
                f"{len(self._in_flight)} requests in flight began"
                f" {'with' if self._adapted else 'without'} an adapter, and would go on"
                " like that; let them end, or abort them, before this update"
            )
        self.core.call_workers("weights_begin_update", manifest.has_model)

    def _receive(self, bucket: Bucket) -> None:
        self.core.call_workers("weights_receive", bucket)

    def _received_fingerprints(self) -> list[Fingerprints]:
        return self.core.call_workers("weights_fingerprints")

    def _commit(self, version: int) -> None:
        adapter = self._lora if self._holds_adapter else None
        self.core.call_workers("weights_commit", adapter)
        self._adapted = adapter is not None
        self._num_loads += 1
        self.core.forget_prefixes(str(self._num_loads))
        self.core.set_version(version)

    def _abort_update(self) -> None:
        self.core.call_workers("weights_abort_update")

    def _probe(
        self, rows: Sequence[Tokens]
    ) -> tuple[list[Float32], list[GenerationProgress]]:
        # A probe does not wait for requests that wait. Those that run may need to end
        # before it has space, so they are continued along with it.
        with self.core.only_running():
            request_ids = self._submit_probes(rows)
            self.core.resume()
            parts, progress = self._step_probes(request_ids)
            if self._state.paused:
                progress += self._pause()

        log_probs = [np.concatenate(parts[request_id]) for request_id in request_ids]
        return log_probs, progress

    def _step_probes(
        self, request_ids: Sequence[str]
    ) -> tuple[dict[str, list[Float32]], list[GenerationProgress]]:
        """Step until every probe has ended; return log-probs and other progress."""
        parts: dict[str, list[Float32]] = {request_id: [] for request_id in request_ids}
        progress: list[GenerationProgress] = []
        pending = set(request_ids)
        while pending:
            for output in self.core.step():
                if not output.request_id.startswith(_PROBE_PREFIX):
                    progress.append(progress_of(output))
                    continue

                # vLLM returns the log-probs of a long prompt in parts.
                scored = prompt_log_probs_of(output)
                if scored is not None:
                    parts[output.request_id].append(scored.log_probs)
                if output.finish_reason is not None:
                    pending.discard(output.request_id)
        return parts, progress

    def _submit_probes(self, rows: Sequence[Tokens]) -> list[str]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
        )
        request_ids = [f"{_PROBE_PREFIX}{number}" for number in range(len(rows))]
        for request_id, tokens in zip(request_ids, rows, strict=True):
            self.core.add(
                request_id,
                tokens.tolist(),
                copy.copy(params),
                cache_salt=str(self._num_loads),
                adapted=self._adapted,
            )
        return request_ids

    def _explain_mismatch(self) -> str:
        names: list[str] = self.core.call_workers("weights_repacked")[0]
        shown = ", ".join(names[:8]) or "no module"
        if len(names) > 8:
            shown += f" and {len(names) - 8} more"
        return f"vLLM repacks the weights of: {shown}"

    # ------------------------------------------------------------------------- lifetime

    def _find_failure(self) -> str | None:
        return "a rank of it has exited" if self.core.is_failed else None

    def _close(self, process_exits: bool) -> None:
        if not self.core.is_failed:
            self.core.call_workers("weights_close")

        # vLLM's shutdown collects garbage three times over all imports, in 1.5 s. The
        # exit of the process releases the same, except for other processes.
        if process_exits and not self._has_processes:
            return
        self.core.close()


def _require_environment() -> None:
    # vLLM reads its environment when it is imported, so it is too late to set it.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RolloutError(
            "the process of a rollout engine must be started with"
            " rollout.vllm_core.environment()"
        )


def _require_model(model_path: str) -> None:
    if not Path(model_path, "config.json").is_file():
        raise RolloutError(
            f"model.path = {model_path!r} is not a local model directory: it has no"
            " config.json"
        )
