"""moto's S3 server on this machine, which can break off what it sends, refuse, or end those who ask at one moment."""

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lightning_tricks._host import address

fsspec = pytest.importorskip("fsspec")
s3fs = pytest.importorskip("s3fs")
werkzeug_app = pytest.importorskip("moto.moto_server.werkzeug_app")


class Server:
    """moto as a WSGI application.

    Attributes:
        drops: how many of the next answers with a file's content are broken off in the middle.
        changes: requests that change what is stored, so far.
        at_change: called with the number of such a request and its method and path, before it is answered. Where it
            returns a function, that is called when the change is made.
        fails: whether each of them is answered by an error of the server.
    """

    def __init__(self) -> None:
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *args: Any) -> None:
                pass

        self.app = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.reset()

    def reset(self) -> None:
        """Forget all that was stored and asked for."""
        self.drops = self.dropped = self.changes = 0
        self.at_change: Callable[[int, str], Any] | None = None
        self.fails = False
        self.post("/moto-api/reset")

    def __call__(self, environ: Any, start_response: Any) -> Any:
        then = None
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE") and path.count("/") > 1 and "moto-api" not in path:
            if self.fails:
                start_response("500 Internal Server Error", [])
                return [b""]
            self.changes += 1
            then = self.at_change and self.at_change(self.changes, f"{environ['REQUEST_METHOD']} {path}")
        body = self.app(environ, start_response)
        if then:
            then()
        if not (self.drops and environ["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environ):
            return body
        self.drops, self.dropped = self.drops - 1, self.dropped + 1
        whole = b"".join(body)

        def half() -> Iterator[bytes]:
            yield whole[: len(whole) // 2]
            raise ConnectionAbortedError

        return half()

    def post(self, path: str, content: bytes = b"") -> None:
        request = urllib.request.Request(self.url + path, content, {"Content-Type": "text/plain"}, method="POST")
        urllib.request.urlopen(request).read()

    @contextmanager
    def asking_for_rights(self) -> Iterator[None]:
        """Inside the `with`, keys have to be those of a user."""
        self.post("/moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self.post("/moto-api/reset-auth", b"inf")

    def kill_at(self, number: int, after: bool, processes: Callable[[], list[int]]) -> None:
        """Kill processes at a change, before or after it is made."""

        def kill() -> None:
            for process in processes():
                os.kill(process, signal.SIGKILL)

        def at_change(seen: int, _: str) -> Any:
            if seen != before + number:
                return None
            if after:
                return kill
            kill()
            raise ConnectionAbortedError  # the change is not made

        before = self.changes
        self.at_change = at_change

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def prepare(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bucket: str) -> Server:
    """Leave the server empty but for a bucket, and set what s3fs needs to find it."""
    for name, value in (
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_CONFIG_FILE", str(tmp_path / "none")),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_MAX_ATTEMPTS", "1"),  # botocore's own, before ours
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(address, "WAITS_SECONDS", (0, 0, 0))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # its own, before ours
    server.reset()
    fsspec.filesystem("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir(bucket)
    return server
