"""A server's processes: what they listen at, what they share, and how they are kept alive."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError, ExitCode, SluiceError
from conf.storage.processes import hold_file_lock
from jobs.support.run_app import run_reported
from jobs.support.terminal import LogFormat, quiet_tensorflow, setup_logging
from training.serving.server_config import SHARED_COUNTS

if TYPE_CHECKING:
    from uvicorn import Config

    from training.serving.access import Access
    from training.serving.server_config import ServerConfig

CONNECTIONS, BACKLOG = 512, 256
"""Open at a time, beyond which requests are answered by 503; taken in one go."""
KEEP_ALIVE_SECONDS = 75
"""Until a connection without a further request is closed: longer than nginx keeps one."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders of an unknown name are made in it
RESTART_SECONDS = 1.0
STOP_SECONDS = 120.0
"""For processes to end by themselves, after the time that each gives what it has begun."""

Tell = Callable[[str], None]
"""Is given what answers where, as soon as it does."""
Work = Callable[[Tell], int]
"""What a process does, picklable; returns its exit code."""
_log = logging.getLogger("sluice.jobs")


@dataclass(frozen=True)
class Serving:
    """What a process of the server serves, who may ask, and how it logs."""

    config: ServerConfig
    access: Access
    log_format: LogFormat = LogFormat.TEXT


def read_token(path: Path) -> str:
    """Reads the token of a file: its first line."""
    try:
        token = path.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
    except OSError as error:
        raise ConfigError("the file of the token cannot be read", received=error) from error
    if not re.fullmatch(r"[!-~]{16,4096}", token):
        raise ConfigError(
            "the file holds no token: 16 to 4096 ASCII characters without spaces",
            received=f"{len(token)} characters in the first line of {path}",
            fix=f"write one: openssl rand -hex 32 > {path}",
        )
    return token


def run_server(serving: Serving, host: str, port: int, processes: int) -> int:
    """Answers requests by processes until SIGTERM or Ctrl-C; returns the exit code."""
    tell: Tell = partial(print, flush=True)
    if serving.log_format is LogFormat.JSON:
        tell = _log.info
    with bind_socket(host, port) as listener:  # A port that is taken is said before models load.
        signal.signal(signal.SIGTERM, _leave)
        if processes == 1:
            return serve(serving, listener, tell)
        from prometheus_client.multiprocess import mark_process_dead

        with _share_folder() as folder:
            shared = replace(serving, config=replace(serving.config, pages=folder / "pages"))
            work = partial(_serve_process, shared, listener)
            # Whoever has the socket is sent connections: none when the processes end.
            with Supervisor(work, mark_process_dead, listener.close) as supervisor:
                return supervisor.run(
                    processes, lambda text: tell(f"{text}, {processes} processes")
                )


def bind_socket(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, not listening yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends each answer at once (TCP_NODELAY).
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            "cannot listen at this address",
            received=f"{host}:{port}: {error.strerror or error}",
            fix="choose another by --host or --port",
        ) from error
    return bound


def _leave(*_: Any) -> None:
    """Ends the process while models load; later the server ends by itself."""
    raise SystemExit(0)


@contextmanager
def _share_folder() -> Iterator[Path]:
    """Gives processes a folder of what they share, in `TMPDIR`."""
    # Files of counts are sparse: a full disk would end a process that writes to them.
    memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with hold_folder("sluice-serve-") as folder, hold_folder("sluice-counts-", memory) as counts:
        os.environ[SHARED_COUNTS] = str(counts)
        yield folder


@contextmanager
def hold_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Makes a folder for the time of the block; removes those of its prefix that the dead left."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for left in parent.glob(f"{prefix}*"):
        # Those of live processes are held, others may be gone already.
        with suppress(OSError, _HeldError):
            if not left.is_symlink() and left.stat().st_uid == os.getuid():
                with hold_file_lock(left / "lock", _HeldError("held")):
                    shutil.rmtree(left, ignore_errors=True)
    # It is named once it is locked, so that no other process takes it for a dead one's.
    new = Path(tempfile.mkdtemp(prefix=f"new-{prefix}", dir=parent))
    folder = parent / new.name.removeprefix("new-")
    try:
        with hold_file_lock(new / "lock"):
            new.rename(folder)
            yield folder
    finally:
        for path in (new, folder):
            shutil.rmtree(path, ignore_errors=True)


class _HeldError(SluiceError):
    pass


def _serve_process(serving: Serving, listener: socket.socket, tell: Tell) -> int:
    """Serves in a process of its own; mistakes end in a message and an exit code."""
    setup_logging(serving.log_format)
    signal.signal(signal.SIGTERM, _leave)
    work = partial(serve, serving, listener, tell)
    return run_reported(work, serving.log_format is LogFormat.JSON)


def serve(serving: Serving, listener: socket.socket, tell: Tell) -> int:
    """Answers requests until SIGTERM or Ctrl-C; those that have begun are answered first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # A card is for training; requests are small.
    with quiet_tensorflow():
        import uvicorn

        from training.serving.app import build_app
        from training.serving.server import Server

    server = Server(serving.config)
    listener.listen(BACKLOG)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    # What is loaded stays: a collection of what requests leave need not look at it, and the second
    # one tells Python how little else there is, so that it collects that soon.
    gc.collect()
    gc.freeze()
    gc.collect()
    app = build_app(server, serving.access)
    runner = uvicorn.Server(build_config(app, 2 * serving.config.limits.seconds))

    def stop(*_: Any) -> None:
        """Ends the server, also where uvicorn raises a signal again."""
        runner.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    tell(f"serving {', '.join(server.store.names)} at http://{host}:{port}")
    runner.run(sockets=[listener])
    return 0


def build_config(app: Any, stop_seconds: float) -> Config:
    """Builds uvicorn's configuration for an application that has so long to end."""
    from uvicorn import Config

    logging.getLogger("uvicorn").handlers = logging.getLogger("sluice").handlers
    return Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(stop_seconds),
        log_config=None,
        log_level="error",  # Clients cause warnings, as many as they like.
        access_log=False,
        server_header=False,
    )


class Supervisor:
    """Processes that do the same beside each other, started anew when one ends.

    `forget` is called with the id of each process that has ended, `end` when all are to end.
    """

    def __init__(self, work: Work, forget: Callable[[int], None], end: Callable[[], None]) -> None:
        self._work, self._forget, self._end = work, forget, end
        self._workers: list[_Worker] = []
        self._ended = threading.Event()

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._ended.set())
        return self

    def run(self, count: int, tell: Tell) -> int:
        """Runs processes until a signal comes; returns the exit code of one that cannot start.

        The first one begins alone: what cannot start is reported once, and what all share is there
        when the others come.
        """
        workers = self._workers
        workers.append(_Worker(self._work))
        said = [workers[0].hear(self._ended)]
        if said[0] is not None:
            workers += [_Worker(self._work) for _ in range(1, count)]
            said += [worker.hear(self._ended) for worker in workers[1:]]
        if None in said:
            return ExitCode.OK if self._ended.is_set() else workers[said.index(None)].find_code()
        tell(str(said[0]))
        while not self._ended.wait(0.2):
            self._keep_alive()
        return ExitCode.OK

    def _keep_alive(self) -> None:
        for place, worker in enumerate(self._workers):
            if not worker.process.is_alive() and not self._ended.wait(RESTART_SECONDS):
                _log.error("a process ended with code %s: started anew", worker.process.exitcode)
                self._forget(worker.process.pid or 0)
                self._workers[place] = _Worker(self._work)

    def __exit__(self, *_: object) -> None:
        self._end()
        for worker in self._workers:
            worker.process.terminate()
        until = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()


class _Worker:
    def __init__(self, work: Work) -> None:
        self._told, ready = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_run, args=(work, ready))
        self.process.start()
        ready.close()

    def hear(self, ended: threading.Event) -> str | None:
        """Waits for what the process says when it is ready; None: it has ended, or all are to."""
        while not ended.is_set():
            if self._told.poll(0.2):
                try:
                    return str(self._told.recv())
                except EOFError:
                    break
        return None

    def find_code(self) -> int:
        """Returns the exit code of a process that has ended; a signal is a failure."""
        self.process.join()
        code = self.process.exitcode or ExitCode.FAILED
        return code if code > 0 else ExitCode.FAILED


def _run(work: Work, ready: Any) -> None:
    """Runs in a process: it ends with the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the first one tells us.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    raise SystemExit(work(ready.send))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
