"""A real S3 server on the loopback, moto's, that can be told to fail, to be slow, or to kill who asks."""

import contextlib
import os
import signal
import threading
import time

from mjax.utils import stores

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Server:
    """Serves buckets on `url` while the context is open.

    Attributes:
      requests: method, path and Range header of each request.
      rule: takes a WSGI environment before a request is answered; True: it is answered with 503.
      delay: seconds before a PUT is answered.
    """

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log_request(self, *_):
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests, self.rule, self.delay = [], None, 0.0
        self._kill, self._writes, self._lock = None, 0, threading.Lock()

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()

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
        if self.rule is not None and self.rule(environ):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(BUSY)))])
            return [BUSY]
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
            start_response("503 Killed", [])
            return [BUSY]
        answer = list(self._app(environ, start_response))
        if kills:
            _kill(process)
        return answer


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
        yield server
        server.rule = None
        fs.rm("bucket", recursive=True)  # the next server of this process has the same objects


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
