"""A replica that stops inside of chosen rows; a module of its own so that worker
processes can import it.
"""

from __future__ import annotations

from concurrent.futures import Future

from verl_ray.cluster.context import concurrent, steering
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.requests import Chunk
from verl_ray.rollout.server import PauseMode, PauseRequest
from workers.rollout import RolloutWorker


class HeldReplica(RolloutWorker):
    """Like any replica, unless it was called to hold rows."""

    _is_held: Future[bool] = Future()

    @steering
    def hold(self, first_row: int, mode: PauseMode) -> None:
        """Pause as soon as a row from this id on has a token and is open, once."""
        is_held = self._is_held = Future()
        thread = self.server._engine_thread

        def open_rows(engine: RolloutEngine) -> set[int]:
            responses = engine._in_flight._responses
            begun = [each for each, response in responses.items() if response.tokens]
            rows = {thread._callers[each].requests[each].request_id for each in begun}
            return {row for row in rows if row >= first_row}

        def arm(engine: RolloutEngine) -> None:
            def step() -> list[Chunk]:
                chunks = type(engine).step(engine)
                if not is_held.done() and open_rows(engine):
                    # It takes effect behind this step.
                    thread.begin_pause(engine, PauseRequest(mode))
                    is_held.set_result(True)
                return chunks

            engine.step = step

        self.server.run(arm)

    @concurrent
    def wait_until_held(self) -> bool:
        """Return whether the rows of `hold` are held, once that is known."""
        return self._is_held.result()

    @steering
    def let_go(self) -> None:
        """Hold nothing any more; what is paused goes on with `resume`."""
        is_held = self._is_held
        self.server.run(lambda _: is_held.done() or is_held.set_result(False))
