"""An S3 server on the loopback interface, in a process of its own, that can fail when told to.

Run as a program with a port, or 0, it prints its port, and serves until its standard input is
closed.  It is moto's application behind a filter: ``POST /_rules`` says which requests fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

HOST = "127.0.0.1"
_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>'
    "<Error><Code>{code}</Code><Message>told to fail</Message></Error>"
)
_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class S3Server:
    """A server that runs; `options` are the `storage_options` for it."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port = port
        self.process = process
        self.endpoint = f"http://{HOST}:{port}"
        self.options: dict[str, Any] = {
            "key": "key",
            "secret": "secret",
            "endpoint_url": self.endpoint,
            "config_kwargs": {"retries": {"max_attempts": 1}},
        }

    def file_system(self) -> Any:
        """Return the file system of fsspec."""
        import fsspec

        return fsspec.filesystem("s3", **self.options)

    @contextmanager
    def failing(
        self, method: str, query: str, action: int | str, times: int = 1 << 30
    ) -> Iterator[None]:
        """Let the first `times` requests fail in the block whose query contains a text.

        `action` is the status of the answer, or "close": the connection, with half of the body
        read.
        """
        self._set_rules([{"method": method, "query": query, "action": action, "times": times}])
        try:
            yield
        finally:
            self._set_rules([])

    def _set_rules(self, rules: list[dict[str, Any]]) -> None:
        request = urllib.request.Request(f"{self.endpoint}/_rules", json.dumps(rules).encode())
        urllib.request.urlopen(request).close()


@contextmanager
def running_server(port: int = 0) -> Iterator[S3Server]:
    with subprocess.Popen(
        [sys.executable, __file__, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield S3Server(int(process.stdout.readline()), process)
        finally:
            process.stdin.close()


class _Filter:
    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._rules: list[dict[str, Any]] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/_rules":
            self._rules = json.loads(_read(environ))
            start_response("200 OK", [("Content-Length", "0")])
            return []
        for rule in self._rules:
            is_meant = rule["method"] == environ["REQUEST_METHOD"]
            is_meant = is_meant and rule["query"] in environ["QUERY_STRING"]
            n_left = rule.setdefault("times", 1 << 30)
            if is_meant and n_left > 0:
                rule["times"] = n_left - 1
                return self._fail(rule["action"], environ, start_response)
        return self._application(environ, start_response)

    def _fail(self, action: Any, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        if action == "close":
            _read(environ, 0.5)
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(2)
            raise ConnectionError
        _read(environ)
        body = _ERROR.format(code=_CODES[action]).encode()
        start_response(f"{action} No", [("Content-Length", str(len(body)))])
        return [body]


def _read(environ: dict[str, Any], part: float = 1) -> bytes:
    """Read the body, or the first part of it: beyond its end a read would wait."""
    nbytes = int(environ.get("CONTENT_LENGTH") or 0)
    return bytes(environ["wsgi.input"].read(int(part * nbytes)))


def main() -> None:
    import threading

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _Filter(DomainDispatcherApplication(create_backend_app))
    server = make_server(HOST, int(sys.argv[1]), application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
