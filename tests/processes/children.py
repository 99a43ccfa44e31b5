"""A program of child processes that does what it is asked for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ray.errors import ConfigError, Problem
from verl_ray.processes.trial import Tell, run_trial


def main(connection: socket.socket) -> None:
    def body(fields: dict[str, Any], tell: Tell) -> Mapping[str, Any]:
        tell("begun", {"folder": tempfile.gettempdir()})
        act = fields["act"]
        if act == "refuse":
            raise ConfigError([Problem("key", Path("value"), "rule", "fix")])
        if act == "raise":
            raise KeyError(act)
        if act == "exit":
            os._exit(3)
        if act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "hang":
            time.sleep(1000)
        if act == "chatter":
            connection.sendall(b"\xff" * 64)
        if act == "escape":
            sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(tempfile.gettempdir(), "kept").touch()
            threading.Thread(target=time.sleep, args=[1000]).start()
            return {"sleeper": sleeper.pid, "text": fields["text"]}
        return {}

    run_trial(connection, body)
