"""As much of the hub as downloads of whole repositories need, on a local port.

A repository is a list of commits, each a folder of files. `HF_ENDPOINT` leads here.
Deliberately not here: large files (Xet), uploads, and pages for people.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Commits of a repository, the oldest first."""

    commits: dict[str, Path] = field(default_factory=dict)
    """Folder of each commit."""
    token: str | None = None
    """Token that its files are given for; None where everybody gets them."""

    def folder(self, revision: str) -> tuple[str, Path] | None:
        """The commit that a revision stands for, and its files."""
        commit = list(self.commits)[-1] if revision == "main" else revision
        return (commit, self.commits[commit]) if commit in self.commits else None


class HubServer(ThreadingHTTPServer):
    """Answers as the hub does, from folders."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._root = root
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[str] = []
        """Method and path of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(
        self, name: str, folder: Path, kind: str = "models", token: str | None = None
    ) -> str:
        """Copy a folder as the newest commit of a repository, and return its id."""
        repository = self.repositories.setdefault((kind, name), Repository())
        repository.token = token
        number = len(repository.commits)
        commit = hashlib.sha1(f"{kind}/{name}/{number}".encode()).hexdigest()
        copy = self._root / kind / name / commit
        shutil.copytree(folder, copy)
        repository.commits[commit] = copy
        return commit


@contextlib.contextmanager
def serving(root: Path) -> Iterator[HubServer]:
    """Serve repositories, of which copies are kept in `root`, while the block runs."""
    with HubServer(root) as server:
        thread = threading.Thread(
            target=server.serve_forever, args=(0.01,), daemon=True
        )
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if api is not None:
            kind, name, revision = api[1], api[2], api[4] or "main"
        elif file is not None:
            kind, name, revision = file[1] or "models", file[2], file[3]
        else:
            self._send(200, b"hub")
            return

        repository = self.server.repositories.get((kind, name))
        if repository is None:
            # As the hub answers strangers, whether it is private or not there at all.
            self._refuse(401, "RepoNotFound")
            return
        commit_and_folder = repository.folder(revision)
        if commit_and_folder is None:
            self._refuse(404, "RevisionNotFound")
            return

        commit, folder = commit_and_folder
        files = {
            str(path.relative_to(folder)): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        if api is not None:
            self._describe(api[3], name, commit, files)
        elif repository.token and repository.token not in str(
            self.headers.get("Authorization")
        ):
            self._refuse(401, "GatedRepo")
        elif file is not None and file[4] in files:
            content = files[file[4]].read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{tag}"'})
        else:
            self._refuse(404, "EntryNotFound")

    def _describe(
        self, what: str, name: str, commit: str, files: dict[str, Path]
    ) -> None:
        if what != "tree":
            siblings = [{"rfilename": file} for file in files]
            self._send_json({"id": name, "sha": commit, "siblings": siblings})
            return
        listed = []
        for file, path in files.items():
            content = path.read_bytes()
            oid = hashlib.sha1(content).hexdigest()
            listed.append(
                {"type": "file", "path": file, "size": len(content), "oid": oid}
            )
        self._send_json(listed)

    def _send_json(self, content: object) -> None:
        headers = {"Content-Type": "application/json"}
        self._send(200, json.dumps(content).encode(), headers)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _send(
        self, status: int, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass
