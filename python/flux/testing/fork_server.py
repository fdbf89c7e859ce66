"""A process that has imported torch and flux, from which `flux.testing.spawn` forks ranks in milliseconds.

It also ends them: ranks never outlive the call that started them, whatever they do and however the caller
dies. multiprocessing's fork server cannot promise that, as its children keep it alive, and a killed caller
leaves its socket in /tmp.

- Each call of `spawn` has a control socket. When that is closed, by the caller or by the caller's death, the
  server kills the processes of the call. SIGKILL ends a stopped process too.
- The kernel kills ranks whose server has died (PR_SET_PDEATHSIG).
- The kernel kills a server whose caller dies during its imports, and continues it if it is stopped
  (F_SETSIG on a socket whose other end only the caller has).

Nothing has a name in the file system. Messages on a control socket, descriptors in brackets:

    caller to server    start RANK [...]; trace: all ranks write where they are to stderr
    server to caller    serving; failed RANK REASON; ended RANK STATUS; end of file: all have ended
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import spawn as mp_spawn
from pathlib import Path

_MESSAGE_BYTES = 1024
_MAX_DESCRIPTORS = 16
_PR_SET_PDEATHSIG = 1
_START = "import sys; sys.path[:] = {}; {}from flux.testing import fork_server; fork_server.main({}, {})"


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that preserve message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(to: socket.socket, message: str, descriptors: list[int] | None = None) -> None:
    """Sends a message. Raises BrokenPipeError if the other end is closed."""
    socket.send_fds(to, [message.encode()], descriptors or [], socket.MSG_NOSIGNAL)


def receive(source: socket.socket, flags: int = 0) -> tuple[list[str], list[int]]:
    """The words of a message, none at the end of file, and its descriptors."""
    flags |= socket.MSG_CMSG_CLOEXEC
    try:
        data, descriptors, _, _ = socket.recv_fds(source, _MESSAGE_BYTES, _MAX_DESCRIPTORS, flags)
    except ConnectionResetError:  # it was closed with messages unread
        return [], []
    return data.decode().split(), list(descriptors)


# ---- the caller's side -------------------------------------------------------------------------------------


class _Client:
    """The fork server of this process, which starts with the first call and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: socket.socket | None = None
        self._alive: socket.socket | None = None
        # Their end of file tells the server that this process has died, so no child may inherit them.
        self._controls: set[socket.socket] = set()

    def open_call(self) -> socket.socket:
        with self._lock:
            ours, theirs = control_sockets()
            with theirs:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._calls is not None
                try:
                    send(self._calls, "call", [theirs.fileno()])
                except BrokenPipeError:  # it died since
                    self._start()
                    send(self._calls, "call", [theirs.fileno()])
            self._controls.add(ours)
            return ours

    def close_call(self, control: socket.socket) -> None:
        self._controls.discard(control)
        control.close()

    def exit_status(self) -> int | None:
        """The server's exit status; None while it runs."""
        with self._lock:
            try:
                return None if self._process is None else self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                return None

    def stop(self) -> None:
        with self._lock:
            self._hang_up()
            if self._process is not None:
                try:
                    self._process.wait(5.0)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Called in a forked child of this process, because the server belongs to the parent."""
        self._lock = threading.Lock()
        self._hang_up()
        for control in self._controls:
            control.close()
        self._controls.clear()
        if self._process is not None:
            self._process.returncode = 0  # the server is not a child of this process
        self._process = None

    def _hang_up(self) -> None:
        for end in (self._calls, self._alive):
            if end is not None:
                end.close()
        self._calls = self._alive = None

    def _start(self) -> None:
        self._hang_up()
        self._calls, calls = control_sockets()
        self._alive, alive = socket.socketpair()
        with calls, alive:
            path = mp_spawn.get_preparation_data("")["sys_path"]
            # If the caller has imported the compiler, ranks need it too: import it once for all.
            compiler = "import torch._dynamo; " if "torch._dynamo" in sys.modules else ""
            start = _START.format(path, compiler, calls.fileno(), alive.fileno())
            # SIGINT from a terminal reaches all processes of a job. This process gets it at the end.
            with _without_interrupts():
                self._process = subprocess.Popen(
                    [mp_spawn.get_executable(), *_interpreter_flags(), "-c", start],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(calls.fileno(), alive.fileno()),
                )
                fcntl.fcntl(alive, fcntl.F_SETOWN, self._process.pid)
                fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def _interpreter_flags() -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Blocks SIGINT; new processes inherit this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


client = _Client()
os.register_at_fork(after_in_child=client.forget)
atexit.register(client.stop)


# ---- the server's side -------------------------------------------------------------------------------------


def main(calls: int, alive: int) -> None:
    """Serves one caller until it dies or hangs up. Importing this module has imported torch and flux."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # From now on the end of file shows the caller's death. SIGCONT wakes a stopped server to see it.
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGCONT)
    from flux.testing import rank_process

    new = _Server(socket.socket(fileno=calls), alive).serve()
    if new is None:
        os._exit(0)
    rank_process.main(*new)


@dataclass
class _Call:
    control: socket.socket
    running: dict[int, int] = field(default_factory=dict)  # rank by process id
    started: list[int] = field(default_factory=list)
    hung_up: bool = False


class _Server:
    """The server: a single thread that forks ranks, waits for them and kills them."""

    def __init__(self, calls: socket.socket, alive: int) -> None:
        self._socket = calls
        self._alive = alive
        self._calls: list[_Call] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._new: tuple[int, list[int]] | None = None
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def serve(self) -> tuple[int, list[int]] | None:
        """Returns (rank, descriptors) in each forked process; None in the server when the caller is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(self._socket, selectors.EVENT_READ, self._open_call)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        while True:
            for key, _ in self._selector.select():
                act: Callable[[], bool] = key.data
                if not act():
                    return self._new

    def _open_call(self) -> bool:
        words, descriptors = receive(self._socket)
        if not words:
            self._end()
            return False
        call = _Call(socket.socket(fileno=descriptors[0]))
        self._calls.append(call)
        self._selector.register(call.control, selectors.EVENT_READ, lambda: self._obey(call))
        _tell(call, "serving")
        return True

    def _obey(self, call: _Call) -> bool:
        words, descriptors = receive(call.control)
        if not words:
            self._selector.unregister(call.control)
            call.hung_up = True
            _signal(call, signal.SIGKILL)
            self._close_if_over(call)
        elif words[0] == "trace":
            _signal(call, signal.SIGUSR1)
        elif words[0] == "start":
            return self._start(call, int(words[1]), descriptors)
        return True

    def _start(self, call: _Call, rank: int, descriptors: list[int]) -> bool:
        server = os.getpid()
        try:
            # The caller may have closed the socket, for example during the imports of this process.
            pid = None if _is_hung_up(call.control) else os.fork()
        except OSError as error:
            _tell(call, f"failed {rank} {error}")
        else:
            if pid == 0:
                self._new = rank, descriptors
                self._leave(server)
                return False
            if pid is not None:
                call.running[pid] = rank
                call.started.append(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _leave(self, server: int) -> None:
        """Called in a new process: makes it die with the server, and closes the server's descriptors."""
        if self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._socket.close()
        for call in self._calls:
            call.control.close()
        for descriptor in (self._woken, self._wake, self._alive):
            os.close(descriptor)

    def _reap(self) -> bool:
        os.read(self._woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return True
            for call in [call for call in self._calls if pid in call.running]:
                rank = call.running.pop(pid)
                _tell(call, f"ended {rank} {os.waitstatus_to_exitcode(status)}")
                self._close_if_over(call)

    def _close_if_over(self, call: _Call) -> None:
        if call.hung_up and not call.running:
            _remove_segments(call)
            call.control.close()
            self._calls.remove(call)

    def _end(self) -> None:
        for call in self._calls:
            _signal(call, signal.SIGKILL)
        for call in self._calls:
            for pid in call.running:
                os.waitpid(pid, 0)
            _remove_segments(call)


def _signal(call: _Call, number: signal.Signals) -> None:
    # These processes have not been waited for, so their ids cannot have been reused.
    for pid, rank in call.running.items():
        if rank >= 0 or number == signal.SIGKILL:
            os.kill(pid, number)


def _is_hung_up(control: socket.socket) -> bool:
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    return bool(poll.poll(0))


def _tell(call: _Call, message: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the end of file that follows is enough
        send(call.control, message)


def _remove_segments(call: _Call) -> None:
    """Removes shared memory (flux.comm.shm) of ranks that were killed before they could remove its name."""
    for pid in call.started:
        for path in Path("/dev/shm").glob(f"flux-{pid}-*"):
            with contextlib.suppress(OSError):
                segment = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    if os.fstat(segment).st_uid == os.geteuid():
                        fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                        path.unlink()
                finally:
                    os.close(segment)
