"""As much of a W&B server as `wandb sync` needs: it keeps the history of every run."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "tests", "entity": {"id": "e", "name": "me"}}


class WandbServer(ThreadingHTTPServer):
    """Answers as W&B does, from the lines that it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Lines of the history of each run, by its id."""
        self.alerts: list[dict[str, Any]] = []
        """Variables of the query of each alert."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def query(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL query. All others are left without an answer."""
        run = str(variables.get("name"))
        if name == "Viewer":
            return {"viewer": {"id": "v", "username": "me", "entity": "me", "teams": {"edges": []}}}  # fmt: skip
        if name == "RunResumeStatus":
            bucket = self._resumed(run) if run in self.history else None
            return {"model": {**PROJECT, "bucket": bucket}}
        if name == "UpsertBucket":
            self.history[run] += []
            bucket = {"id": "b", "name": run, "displayName": run, "config": "{}", "project": PROJECT}  # fmt: skip
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "CreateRunFiles":
            files = [
                {"name": file, "uploadUrl": f"{self.url}/{file}"}
                for file in variables["files"]
            ]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}  # fmt: skip
        if name == "NotifyScriptableRunAlert":
            self.alerts.append(variables)
            return {"notifyScriptableRunAlert": {"success": True}}
        if name == "ArtifactType":
            return {"project": None}
        if name == "CreateArtifact":
            # It is there already, so nothing of a table is uploaded.
            sequence = {"id": "s", "latestArtifact": None}
            artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": sequence}
            return {"createArtifact": {"artifact": artifact}}
        return {}

    def _resumed(self, run: str) -> dict[str, Any]:
        lines = self.history[run]
        return {
            "name": run, "displayName": run, "config": "{}", "tags": [], "summaryMetrics": "{}",
            "historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]",
            "historyTail": json.dumps([json.dumps(line) for line in lines[-1:]]), "wandbConfig": '{"t": 1}',
        }  # fmt: skip

    def write(self, run: str, files: dict[str, Any]) -> None:
        """Put lines of the history at their place, as W&B's file stream does."""
        history = files.get("wandb-history.jsonl")
        if history is not None:
            lines = [json.loads(line) for line in history["content"]]
            self.history[run][history["offset"] :] = lines


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self._body()
        answer: dict[str, Any] = {}
        if self.path == "/graphql":
            query = json.loads(body)
            # Some queries have their name in their text alone.
            name = (
                query.get("operationName")
                or re.split(r"\W+", query["query"].strip())[1]
            )
            answer = {"data": self.server.query(name, query.get("variables", {}))}
        elif self.path.endswith("/file_stream"):
            run = self.path.split("/")[-2]
            self.server.write(run, json.loads(body).get("files") or {})
        self._reply(answer)

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            return gzip.decompress(content)
        return content

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving() -> Iterator[WandbServer]:
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
