"""Server-sent events over HTTP.

Invariant: the reply begins with the first event, so until then a call can still
fail with a status of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web


class EventStream:
    """A reply that is sent event by event."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        # Several choices send their events at the same time.
        self._lock = asyncio.Lock()

    @property
    def has_begun(self) -> bool:
        """Whether the status was sent, after which it cannot change any more."""
        return self._response.prepared

    async def send(self, event: Mapping[str, object] | str) -> None:
        """Send an event: a JSON object, or a text as it is."""
        async with self._lock:
            if not self.has_begun:
                await self._response.prepare(self._request)
            text = event if isinstance(event, str) else json.dumps(event)
            await self._response.write(f"data: {text}\n\n".encode())

    async def end(self) -> web.StreamResponse:
        """Send the end that OpenAI's clients expect."""
        await self.send("[DONE]")
        await self._response.write_eof()
        return self._response
