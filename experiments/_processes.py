"""Which host and process owns a run, whether it still lives, and how a signal or an error ends it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

# Tolerance for clock steps; a later process that got the same number started later than this.
PID_REUSE_SECONDS = 5.0
OUT_OF_MEMORY_NAMES = {"MemoryError", "OutOfMemoryError"}
OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "std::bad_alloc", "CUDA out of memory")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived while a run was open; the exit code is 128 + the signal's number."""


def host_id() -> str:
    """Sixteen hex digits that tell hosts apart without naming them: a hash, stable for one host."""
    parts = [socket.gethostname(), _network_card(), _machine_id(), _process_namespace()]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _network_card() -> str:
    card = uuid.getnode()
    made_up = card >> 40 & 1  # Python found no card and drew a number for this process
    return "" if made_up else str(card)


def _machine_id() -> str:
    with suppress(OSError):
        return Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    return ""


def _process_namespace() -> str:
    # Containers of one host may share its name, but a process number means something in its own one only.
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def process_tags() -> dict[str, str]:
    """Tags that name this process: its host (hashed), number and start (seconds since 1970)."""
    process = psutil.Process()
    return {
        "process.host": host_id(),
        "process.pid": str(process.pid),
        "process.started": f"{process.create_time():.2f}",
    }


def process_lives(tags: Mapping[str, str]) -> bool:
    """Whether the process named by a run's tags still runs; unreadable tags count as alive."""
    try:
        pid, started = int(tags["process.pid"]), float(tags["process.started"])
    except (KeyError, ValueError):
        return True
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return abs(process.create_time() - started) < PID_REUSE_SECONDS
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is Python's, CUDA's or the CPU allocator's out of memory."""
    while error is not None:
        if OUT_OF_MEMORY_NAMES & {base.__name__ for base in type(error).__mro__}:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__
    return False


def _raise_terminated(signal_number: int, _frame: Any) -> None:
    raise Terminated(128 + signal_number)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into Terminated; an ignored one (nohup) stays ignored."""
    with _handlers(dict.fromkeys(("SIGTERM", "SIGHUP"), _raise_terminated)):
        yield


@contextmanager
def signals_wait() -> Iterator[None]:
    """Ignore a second signal while the status is written, a few milliseconds."""
    with _handlers(dict.fromkeys(("SIGTERM", "SIGHUP", "SIGINT"), signal.SIG_IGN)):
        yield


@contextmanager
def _handlers(wanted: Mapping[str, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets handlers in the main thread only
        return
    numbers = {getattr(signal, name): new for name, new in wanted.items() if hasattr(signal, name)}
    old = {number: signal.getsignal(number) for number in numbers}
    replaced = {n: handler for n, handler in old.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in replaced:
            signal.signal(number, numbers[number])
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
