"""vLLM as a rollout engine: its engine core stepped in this process, on a GPU or a CPU.

Invariant: token ids in, token ids out; what is drawn depends on the request alone (prompt, sampling, seed) and the
policy version (on a GPU nobody has looked), and no sampling setting comes from the model directory. vLLM's request
front (tokenizer, incremental text, dictionaries of log-probs) is left out: requests go to the engine core and tokens
come from it. Deliberately not here: Ray, vLLM's inside (`vllm_core`), and what only a CPU needs (`vllm_cpu_worker`).
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import (
    VLLM_BATCHED_REQUESTS,
    VLLM_BATCHED_TOKENS,
    VLLM_LORA_RANKS,
    RolloutEngineConfig,
)
from verl_ray.data.stages import Finish
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import RolloutError, VerlRayError, WeightSyncError
from verl_ray.profiling import allocator
from verl_ray.rollout.base import Part, RolloutEngine
from verl_ray.rollout.requests import Float32, Progress, Request, Sampling, Tokens
from verl_ray.rollout.vllm_core import TRANSFER, VllmCore, require_supported
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutput

_SAMPLINGS_KEPT = 1024


def environment(
    device: str, threads: int, tensor_parallel: int = 1, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment variables that a process needs before it imports torch, to hold a `VllmEngine`.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads of each rank of the engine.
        tensor_parallel: ranks of the engine.
        given: the variables that the process has, some of which it may not keep; None = those of this one.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core is stepped by its owner: starts in 3 s instead of 40
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are local directories; a look-up would hang without internet
        "OMP_NUM_THREADS": str(threads),
    }
    if device == "cpu":
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request waits 8-15 s for a compiler
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if tensor_parallel == 1 else _cores(threads, tensor_parallel)
    else:
        variables |= _without_expandable_segments(os.environ if given is None else given)
    return variables


def _without_expandable_segments(given: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings for a process that sleeps. What vLLM puts to sleep lies in a memory pool of its own, and
    torch's expandable segments are not for such pools (pytorch#147851): vLLM 0.32 turns them off while it fills one,
    earlier ones refuse to start. Trainers, whose environment this is not, have them (`profiling/allocator.py`)."""
    changed: dict[str, str] = {}
    for name in allocator.VARIABLES:
        settings = [one.strip() for one in given.get(name, "").split(",") if one.strip()]
        kept = [one for one in settings if not allocator.is_expandable(one)]
        if kept != settings:
            changed[name] = ",".join(kept)
            print(f"warning: the rollout engine runs without expandable_segments of {name}: it cannot sleep with them")
    return changed


def _cores(threads: int, ranks: int) -> str:
    """Consecutive cores of this machine for each rank, as vLLM writes it; the ranks share cores if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = ([cores[(rank * threads + i) % len(cores)] for i in range(threads)] for rank in range(ranks))
    return "|".join(",".join(str(core) for core in sorted(set(of_rank))) for of_rank in chosen)


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
            raise RolloutError("the process of a rollout engine must be started with rollout.vllm_engine.environment()")
        if not Path(model_path, "config.json").is_file():
            raise RolloutError(f"model.path = {model_path!r} is not a local model directory: it has no config.json")
        self._max_model_len = max_model_len
        require_supported()
        try:
            vllm_config = _vllm_config(
                model_path, config, max_model_len, seed, device, without_weights=initial_version is None, sleeps=sleeps,
                lora=lora,
            )  # fmt: skip
            self._end_tokens = _end_tokens(model_path, vllm_config)
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
        if request.adapter is not None:
            raise RolloutError(f"request {request.request_id}: no adapter {request.adapter!r} is loaded in this engine")

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


def _register_model(model_path: str) -> None:
    """Tell vLLM the class of the model. It would look at it in a process that imports all of vLLM again, which takes
    10 s the first time in every home directory, lest this one touch a GPU."""
    from vllm.model_executor.models import ModelRegistry

    for name in json.loads(Path(model_path, "config.json").read_text()).get("architectures") or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _vllm_config(
    model_path: str, config: RolloutEngineConfig, max_model_len: int, seed: int, device: str, **more: Any
) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if (device == "cpu") != current_platform.is_cpu():
        raise RolloutError(
            f"rollout on {device!r} was asked for, but the installed vLLM runs on {current_platform.device_type!r}: "
            f"install the extra 'cpu' or 'gpu' of this package"
        )
    fixed = fixed_arguments(model_path, config, max_model_len, seed, device, **more)
    preferred: dict[str, Any] = {
        "enable_prefix_caching": True,
        # vLLM's own are small but for its server and its offline engine
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(max_model_len, VLLM_BATCHED_TOKENS),
    }
    if device == "cpu":
        _register_model(model_path)
    if clash := sorted(fixed.keys() & config.vllm_args.keys()):
        raise RolloutError(f"rollout.vllm_args sets {clash}, which other keys of rollout, or the engine, set")
    return EngineArgs(**{**preferred, **config.vllm_args, **fixed}).create_engine_config()


def fixed_arguments(
    model_path: str,
    config: RolloutEngineConfig,
    max_model_len: int,
    seed: int,
    device: str,
    *,
    without_weights: bool,
    sleeps: bool,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """The engine arguments that rollout.vllm_args may not set; `verl_ray.config.rules` tells the user so."""
    fixed: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel,
        # In a placement group of Ray vLLM would take its bundles apart, one rank per bundle, and on a CPU refuse.
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if without_weights else "auto",
        "weight_transfer_config": {"backend": TRANSFER},
        "worker_extension_cls": "verl_ray.rollout.vllm_loader.WeightLoader",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if lora is not None:
        fixed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm_rank(lora.rank)}
        # Without it vLLM also prepares the head for an adapter, whose log-probs of prompts then fail (0.32 on a CPU).
        fixed["lora_target_modules"] = list(lora.targets)
    if device == "cpu":
        fixed["worker_cls"] = "verl_ray.rollout.vllm_cpu_worker.SleepingCPUWorker"
        fixed["enforce_eager"] = True
        # With seeds per request, a prompt that is prefilled in parts fails on a CPU (its generators know no offset).
        fixed["enable_chunked_prefill"] = False
    else:
        fixed["enable_sleep_mode"] = sleeps
        # With its KV cache given in bytes vLLM sizes nothing by this share of the device, but refuses to start while
        # less of it is free: a trainer on the same GPU would keep it from starting.
        fixed["gpu_memory_utilization"] = 0.01
    return fixed


def vllm_rank(rank: int) -> int:
    """The least room for adapters that vLLM makes and that this rank fits in."""
    return next(room for room in VLLM_LORA_RANKS if rank <= room)


def _end_tokens(model_path: str, vllm_config: VllmConfig) -> tuple[int, ...]:
    """Tokens that end a response: those of generation_config.json and the tokenizer's; else those of config.json."""
    model_config = vllm_config.model_config
    named: set[int] = set()
    for ids in (model_config.try_get_generation_config().get("eos_token_id"), load_tokenizer(model_path).eos_token_id):
        named.update([ids] if isinstance(ids, int) else ids or [])
    if not named:
        ids = getattr(model_config.hf_text_config, "eos_token_id", None)
        named.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(named))
