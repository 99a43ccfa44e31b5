"""vLLM as a rollout engine: its engine core stepped in this process, on a GPU or a CPU.

Invariant: token ids in, token ids out; what is drawn depends on the request alone (prompt, sampling, seed) and the
policy version (on a GPU nobody has looked), and no sampling setting comes from the model directory. vLLM's request
front (tokenizer, incremental text, dictionaries of log-probs) is left out: requests go to the engine core and tokens
come from it. Deliberately not here: Ray, how vLLM is set up (`vllm_setup.py`), its inside (`vllm_core.py`), and what
only a CPU needs (`vllm_cpu_worker.py`).
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.data.stages import Finish
from verl_ray.errors import RolloutError, VerlRayError, WeightSyncError
from verl_ray.rollout.base import Part, RolloutEngine
from verl_ray.rollout.requests import Float32, Progress, Request, Sampling, Tokens
from verl_ray.rollout.vllm_core import VllmCore, require_supported
from verl_ray.rollout.vllm_setup import end_tokens_of, engine_config
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput

_SAMPLINGS_KEPT = 1024


class VllmEngine(RolloutEngine):
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
    ) -> None:
        """Start vLLM on a local model directory.

        Args:
            max_model_len: most tokens of prompt and response together.
            device: "cpu" or "cuda"; the process must have been started with `environment(device, ...)`.
            initial_version: the policy version that the model directory holds. None: its weights are not read, and a
                weight update must be committed before the engine generates.
            sleeps: whether it will be asked to free memory, which a GPU must know from the start.
            lora: the adapter that updates will bring beside the model.

        Raises:
            RolloutError: vLLM cannot run this; says why and which key to change.
        """
        super().__init__(initial_version)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise RolloutError("the process of a rollout engine must be started with rollout.vllm_setup.environment()")
        if not Path(model_path, "config.json").is_file():
            raise RolloutError(f"model.path = {model_path!r} is not a local model directory: it has no config.json")
        self._max_model_len = max_model_len
        require_supported()
        try:
            vllm_config = engine_config(
                model_path, config, max_model_len, seed, device, without_weights=initial_version is None, sleeps=sleeps,
                lora=lora,
            )  # fmt: skip
            self._end_tokens = end_tokens_of(model_path, vllm_config)
            self._vocabulary = int(vllm_config.model_config.get_vocab_size())
            self.core = VllmCore(vllm_config)
            self._has_processes = config.tensor_parallel > 1
        except VerlRayError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM did not start on {model_path} ({device}): {error}") from error
        self._can_sleep = device == "cpu" or vllm_config.model_config.enable_sleep_mode
        self._sampling_params = functools.lru_cache(_SAMPLINGS_KEPT)(self._make_sampling_params)
        self._loads = 0
        self._lora, self._adapted = lora, False

    # ------------------------------------------------------------------------------------------------- generation

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self._end_tokens

    def _add(self, requests: Sequence[Request]) -> None:
        prepared = []
        for request in requests:
            self._check(request)
            params = copy.copy(self._sampling_params(request.sampling))
            params.seed = request.seed
            prepared.append((request, params))
        for request, params in prepared:
            tokens = request.tokens.tolist()
            self.core.add(
                str(request.request_id), tokens, params, str(self._loads), request.session, adapted=self._adapted
            )

    def _check(self, request: Request) -> None:
        total = len(request.tokens) + request.sampling.max_tokens
        if total > self._max_model_len:
            raise RolloutError(
                f"request {request.request_id}: {len(request.tokens)} prompt tokens and up to "
                f"{request.sampling.max_tokens} response tokens are more than the engine's {self._max_model_len}; "
                f"lower data.max_prompt_tokens or rollout.max_response_tokens"
            )
        least, most = int(request.tokens.min()), int(request.tokens.max())
        if least < 0 or most >= self._vocabulary:  # one of them would end the engine
            raise RolloutError(
                f"request {request.request_id}: found the token ids {least} to {most}, expected 0 to "
                f"{self._vocabulary - 1}, the vocabulary of the model"
            )

    def _make_sampling_params(self, sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams

        if sampling.temperature and not 0.01 <= sampling.temperature <= 2:
            raise RolloutError(
                f"rollout.temperature = {sampling.temperature}: vLLM samples at 0 (greedy) or from 0.01 to 2"
            )
        stop = self._end_tokens if sampling.stop_token_ids is None else sampling.stop_token_ids
        try:
            return SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(stop),
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
        except ValueError as error:
            raise RolloutError(f"vLLM refuses {sampling}: {error}") from error

    def _advance(self) -> Iterator[Progress]:
        yield from map(_progress, self.core.step())

    def _drop(self, request_ids: Sequence[int]) -> None:
        self.core.abort([str(request_id) for request_id in request_ids])

    def _hold(self) -> list[Progress]:
        return [_progress(output) for output in self.core.hold()]

    def _let_go(self) -> None:
        self.core.let_go()

    def _probe(self, rows: Sequence[Tokens]) -> tuple[list[Float32], list[Progress]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        for number, tokens in enumerate(rows):
            self.core.add(
                f"{_PROBE}{number}", tokens.tolist(), copy.copy(params), str(self._loads), adapted=self._adapted
            )
        was_held = self.core.held
        self.core.let_go()
        found: dict[str, list[Float32]] = {}
        drawn, waiting = [], {f"{_PROBE}{number}" for number in range(len(rows))}
        while waiting:
            for output in self.core.step():
                if not output.request_id.startswith(_PROBE):
                    drawn.append(_progress(output))
                    continue
                if output.new_prompt_logprobs_tensors is not None:
                    values = output.new_prompt_logprobs_tensors.logprobs[:, 0]
                    found.setdefault(output.request_id, []).append(values.float().cpu().numpy())
                if output.finish_reason is not None:
                    waiting.discard(output.request_id)
        if was_held:
            drawn += self._hold()
        return [np.concatenate(found[f"{_PROBE}{number}"]) for number in range(len(rows))], drawn

    def _find_failure(self) -> str | None:
        return "a rank of it has ended" if self.core.is_failed else None

    def _suspects(self) -> str:
        names: list[str] = self.core.call_workers("weights_repacked")[0]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"vLLM repacks the weights of: {shown or 'no module'}"

    # ---------------------------------------------------------------------------------------------------- memory

    def _free(self, parts: frozenset[Part]) -> None:
        if not self._can_sleep:
            raise RolloutError("the rollout engine was started with rollout.sleep = never and cannot sleep")
        if "weights" in parts:
            self.core.free_everything()
        else:
            self.core.free_kv_cache()

    def _restore(self, part: Part) -> None:
        self.core.wake(part)

    @property
    def memory_bytes(self) -> int:
        return sum(dict(self.core.call_workers("memory_in_use")).values())

    # --------------------------------------------------------------------------------------------------- weights

    def _connect(self, address: Address, route: Route, first_receiver: int) -> None:
        self.core.call_workers("weights_connect", address, route, first_receiver)

    def _begin_update(self, manifest: Manifest) -> None:
        self._brings_adapter = bool(manifest.adapter.parameters)
        if self._brings_adapter and self._lora is None:
            raise WeightSyncError("an adapter is sent, and the engine was started for a model without one")
        self.core.call_workers("weights_begin_update", manifest.has_model)

    def _receive(self, bucket: Bucket) -> None:
        self.core.call_workers("weights_receive", bucket)

    def _arrived(self) -> list[Prints]:
        return self.core.call_workers("weights_arrived")

    def _commit(self, version: int) -> None:
        adapter = self._lora if self._brings_adapter else None
        self.core.call_workers("weights_commit", adapter)
        self._adapted = adapter is not None
        self._loads += 1
        if not self._in_flight:
            self.core.forget_prefixes()
        self.core.note_version(version)

    def _abort_update(self) -> None:
        self.core.call_workers("weights_abort_update")

    def _release(self, process_ends: bool) -> None:
        if not self.core.is_failed:
            self.core.call_workers("weights_close")
        if process_ends and not self._has_processes:
            return  # vLLM's shutdown goes three times through everything that was imported: 1.5 s
        self.core.close()


def _progress(output: EngineCoreOutput) -> Progress:
    log_probs = output.new_logprobs
    return Progress(
        int(output.request_id),
        output.new_token_ids,
        [] if log_probs is None else log_probs.logprobs[:, 0].tolist(),
        None if output.finish_reason is None else _FINISH[str(output.finish_reason)],
    )


_PROBE = "probe-"
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}
