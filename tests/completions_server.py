"""A server of completions that writes no text: `python completions_server.py --port P ...`, or a thread in a test.

It speaks what mreader/bench/client.py asks: /health, /v1/models, and /v1/completions as server-sent events.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class CompletionsServer(ThreadingHTTPServer):
    """asked: the bodies of the requests; together: how many of them it waits for before it answers any

    ends:   instead of a whole answer: "short" (a token less), "error" (an event that says so), "refusal" (status 400),
            "death" (of the process, as vLLM dies), "kill" (of the process, from outside)
    """

    def __init__(self, port: int = 0, together: int = 1, ends: str = "") -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.gathered = threading.Barrier(together)
        self.ends = ends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(**options: Any) -> Iterator[CompletionsServer]:
    """A server in a thread, while the block lasts."""
    with CompletionsServer(**options) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: CompletionsServer

    def do_GET(self) -> None:
        if self.path.startswith("/v1/") and os.environ.get("VLLM_API_KEY"):  # as vLLM does
            self._answer(401, '{"error": "Unauthorized"}')
            return
        self._answer(200, json.dumps({"data": [{"id": "the model"}]}) if self.path == "/v1/models" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.server.ends == "refusal":
            self._answer(400, '{"error": "the prompt is too long"}')
            return
        if self.server.ends == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.server.ends == "death":
            print("Traceback (most recent call last):\nMemoryError: no room for the answer", flush=True)
            os._exit(1)
        self.server.gathered.wait(20)
        self._answer(200, "".join(f"data: {event}\n\n" for event in self._events(body["max_tokens"])))

    def _events(self, tokens: int) -> Iterator[str]:
        written = tokens - (self.server.ends == "short")
        for _ in range(written):
            yield json.dumps({"choices": [{"text": ""}], "usage": None})
        if self.server.ends == "error":
            yield json.dumps({"error": {"message": "out of memory"}})
        yield json.dumps({"choices": [], "usage": {"completion_tokens": written}})
        yield "[DONE]"

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def main() -> None:
    """Options as `Engine.command` gives them; --die fails as vLLM does, --child FILE leaves a process behind, --ends
    is how answers do.
    """
    options = sys.argv[1:]
    if "--die" in options:
        print("INFO starting")
        raise MemoryError("no room for the cache")
    if "--child" in options:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options[options.index("--child") + 1]).write_text(str(child.pid))
    print(
        f"INFO mreader: a decoded token reads {os.environ['MREADER_READS'] or 'what the checkpoint says'}", flush=True
    )
    print("Traceback (most recent call last):\nValueError: as vLLM logs some, and goes on", flush=True)
    ends = options[options.index("--ends") + 1] if "--ends" in options else ""
    CompletionsServer(int(options[options.index("--port") + 1]), ends=ends).serve_forever()


if __name__ == "__main__":
    main()
