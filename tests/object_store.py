"""A real S3 server on the loopback, moto's, that fails, slows down, lags or kills its client on request."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

from mjax.utils import stores

BUSY = 503, "SlowDown", "Please reduce your request rate."
CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


class Server:
    """Serves buckets on `url` while the context is open.

    Attributes:
      requests: method, path and Range header of each request.
      rule: takes a WSGI environment before a request is answered; True: it is answered with 503; status, code and
        message: with these; "reset": the connection is closed.
      delay: seconds before a PUT is answered.
      lag: seconds until a listing has an object.
      conditions: whether conditional writes are obeyed.
    """

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log_request(self, *_):
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self._listen = lambda port: make_server("127.0.0.1", port, self._answer, threaded=True, request_handler=Quiet)
        self._server = self._listen(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests, self.rule, self.delay, self.lag, self.conditions = [], None, 0.0, 0.0, True
        self._written = {}
        self._kill, self._writes, self._lock = None, 0, threading.Lock()

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()

    def stop(self):
        """Answer nothing from now on, until `start`."""
        self._server.shutdown()
        self._server.server_close()

    def start(self):
        """Answer again, with the same objects."""
        self._server = self._listen(self._server.server_port)
        self.__enter__()

    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def kill_at(self, write, process, part="", after=None):
        """Kill `process` at its PUT or DELETE number `write` from now on, of those with `part` in their path, before it
        takes effect or `after` it; by default after even ones."""
        self._kill, self._writes = (write, process, part, write % 2 == 0 if after is None else after), 0

    @property
    def writes(self):
        return self._writes

    def _answer(self, environ, start_response):
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        self.requests.append((method, path, environ.get("HTTP_RANGE")))
        if self.rule is not None and (refusal := self.rule(environ)):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if refusal == "reset":
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            return _refuse(start_response, *(BUSY if refusal is True else refusal))
        if not self.conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if method == "PUT":
            self._written[path.encode("latin-1").split(b"/", 2)[-1]] = time.monotonic()
        if method == "PUT" and self.delay:
            time.sleep(self.delay)
        kills = False
        if method in ("PUT", "DELETE") and self._kill is not None:
            with self._lock:
                write, process, part, after = self._kill
                self._writes += part in path
                kills = self._writes == write and (part in path)
        if kills and not after:
            _kill(process)
            return _refuse(start_response, *BUSY)
        if self.lag and method == "GET" and "list-type" in environ["QUERY_STRING"]:
            return self._lagging(environ, start_response)
        answer = list(self._app(environ, start_response))
        if kills:
            _kill(process)
        return answer

    def _lagging(self, environ, start_response):
        """A listing without what was written in the last `lag` seconds."""
        started = []
        content = b"".join(self._app(environ, lambda *arguments: started.append(arguments)))

        def old(match):
            key = unquote_to_bytes(re.search(rb"<Key>(.*?)</Key>", match[0])[1].replace(b"+", b" "))
            recent = time.monotonic() - self._written.get(key, -self.lag) < self.lag
            return b"" if recent else match[0]

        content = CONTENTS.sub(old, content)
        status, headers, *_ = started[0]
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, [*headers, ("Content-Length", str(len(content)))])
        return [content]


def _refuse(start_response, status, code, message):
    content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    start_response(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))])
    return [content]


@contextlib.contextmanager
def bucket(monkeypatch, caches):
    """s3://bucket on a server, in the environment of this process, with a folder of caches."""
    import s3fs

    with Server() as server:
        for name, value in {**server.environment(), "XDG_CACHE_HOME": str(caches)}.items():
            monkeypatch.setenv(name, value)
        stores._file_system.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()
        fs = stores.Store("s3").fs
        fs.mkdir("bucket")
        try:
            yield server
        finally:
            server.rule, server.lag = None, 0.0
            urlopen(Request(f"{server.url}/moto-api/reset", method="POST")).close()  # the next one of this process


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
