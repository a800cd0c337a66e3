"""Memory of the strategy alone: a fresh process loads it, decodes the longest block once, and reports.

In the process that measures speed the references and the experiment store live too, so its own size says little.
`measure_memory` starts `python -m experiments.memory`: the resolved configuration comes as JSON on standard
input, the answer is one JSON object, the last line of standard output. Nothing is timed or logged here.

What imports torch is imported late, in the child: by then the child already watches its parent.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from experiments._processes import is_out_of_memory
from experiments.config import RunConfig, from_resolved

if TYPE_CHECKING:
    from experiments.point import PreparedPoint
    from specdec.decoding.base import Decoder
    from specdec.types import Request

MIB = 2**20
TIMEOUT_S = 600.0
WATCH_INTERVAL_S = 0.5
# Nobody sees the child's bars, and the last line it prints has to be its reason.
QUIET = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class MemoryProbeError(RuntimeError):
    """The child gave no answer; the message is one line. Memory was not measured, and nothing else is wrong."""


@dataclass(frozen=True)
class ProcessMemory:
    """What a process that held one strategy and nothing else needed, in MiB of 2**20 bytes.

    On the CPU: resident memory of the process, interpreter and libraries included.
    `peak_mib` includes the loading: the weights' file is mapped while it is read, and for a quantized format the
    unquantized weights pass through memory.
    `steady_mib` is what stays after an answer is decoded and dropped: weights, caches, libraries. Pages that
    the allocator keeps for later are given back first; pages of a cache that no token was written to don't count.
    `base_mib` is the same before any model is loaded, with everything imported but what a weight format
    imports itself, and the prompts read.

    `peak_load_mib`, `peak_prefill_mib` and `peak_decode_mib` are the most while the strategy was loaded, while prompts
    were read, and while tokens were written; None where the system does not forget a peak (only Linux does).

    On CUDA: memory of torch's tensors on the device, peak and now; `base_mib` is 0, the CUDA context not included.
    """

    peak_mib: float
    steady_mib: float
    base_mib: float
    peak_load_mib: float | None = None
    peak_prefill_mib: float | None = None
    peak_decode_mib: float | None = None

    def metrics(self) -> dict[str, float]:
        """`memory/...` by contract name."""
        return {f"memory/{name}": value for name, value in asdict(self).items() if value is not None}


def measure_memory(config: RunConfig, timeout_s: float = TIMEOUT_S) -> ProcessMemory:
    """Load a strategy alone in a process of its own and decode the workload's longest block of requests once.

    Raises MemoryProbeError where that fails or takes longer than `timeout_s` seconds. An exception that arrives
    meanwhile (Ctrl-C, Terminated) ends the child; a parent that is killed takes it along.
    """
    try:
        done = subprocess.run(
            [*_child_command(), str(os.getpid())],
            input=json.dumps(asdict(config)),
            env={**os.environ, **QUIET, "PYTHONPATH": _module_path()},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MemoryProbeError(f"took longer than {timeout_s:g} s") from error
    except OSError as error:
        raise MemoryProbeError(f"can't be started: {_one_line(error)}") from error
    if done.returncode:
        raise MemoryProbeError(_reason(done.returncode, done.stderr))
    return _answer(done.stdout)


def _child_command() -> list[str]:
    # -P: a folder `experiments` in the working directory must not stand in for this one.
    return [sys.executable, "-P", "-m", "experiments.memory"]


def _module_path() -> str:
    """PYTHONPATH by which the child imports what this process would, an external plug-in's helpers included."""
    root = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([*(folder or os.getcwd() for folder in sys.path), root])


def _reason(status: int, stderr: str) -> str:
    if status < 0:
        name = _signal_name(-status)
        return f"killed by {name}, perhaps for lack of memory" if name == "SIGKILL" else f"killed by {name}"
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {status}"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _answer(stdout: str) -> ProcessMemory:
    lines = stdout.splitlines()
    try:
        return ProcessMemory(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError) as error:
        raise MemoryProbeError(f"gave no answer but {lines[-1:]}") from error


# --- the child


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this process; the argument, where given, is the number of the parent to die with."""
    for parent_pid in map(int, sys.argv[1:] if arguments is None else arguments):
        _die_with(parent_pid)
    _offer_to_be_killed_first()
    try:
        found = _measure_this_process(json.load(sys.stdin))
    except Exception as error:
        print(_explained(error), file=sys.stderr)
        return 1
    print(json.dumps(asdict(found)))
    return 0


def _die_with(parent_pid: int) -> None:
    """End this process soon after its parent has ended, however that came about."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(WATCH_INTERVAL_S)
        os._exit(1)  # at once: nobody is left to read an answer

    # By polling: the kernel's own signal (prctl) is Linux only, and comes when the starting *thread* ends.
    if os.name == "posix":
        threading.Thread(target=watch, daemon=True).start()


def _offer_to_be_killed_first() -> None:
    """Where memory runs out, Linux kills the largest process: the parent, which holds the run's results."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _explained(error: Exception) -> str:
    if is_out_of_memory(error):
        return f"out of memory: {_one_line(error)}"
    return (
        _one_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {_one_line(error)}"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _measure_this_process(values: Mapping[str, Any]) -> ProcessMemory:
    """Raises whatever preparing, loading and decoding raise."""
    from experiments.point import prepare

    point = prepare(from_resolved(values))
    is_cuda = point.config.device == "cuda"
    read_mib, peak_mib, forget_peak = _CUDA if is_cuda else _RESIDENT
    _, base_mib = read_mib()
    can_forget = forget_peak()
    decoder, block = _strategy_alone(point)
    peaks = {"load": peak_mib(), "prefill": 0.0, "decode": 0.0}
    forget_peak()
    for step in decoder.generate(block):  # the answer is dropped as it comes
        phase = "prefill" if step.phase == "prefill" else "decode"
        peaks[phase] = max(peaks[phase], peak_mib())
        forget_peak()
    last_peak_mib, steady_mib = read_mib()
    phases = {f"peak_{phase}_mib": mib for phase, mib in peaks.items() if can_forget and mib}
    return ProcessMemory(max(last_peak_mib, *peaks.values()), steady_mib, base_mib, **phases)


def _strategy_alone(point: PreparedPoint) -> tuple[Decoder, Sequence[Request]]:
    """The loaded strategy, and the requests of the block with the longest text."""
    import torch

    from experiments.strategy import build_decoder

    torch.set_num_threads(point.config.threads or 1)
    block = max(point.blocks, key=lambda requests: max(request.max_length for request in requests))
    return build_decoder(point.arms.strategy, point.pool, point.settings), block


def _allocated_mib() -> tuple[float, float]:
    """CUDA memory of this process's tensors: the most it has been, and now without garbage."""
    import torch

    gc.collect()
    return _most_allocated_mib(), torch.cuda.memory_allocated() / MIB


def _most_allocated_mib() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / MIB


def _forget_allocated() -> bool:
    import torch

    torch.cuda.reset_peak_memory_stats()
    return True


def _forget_resident() -> bool:
    """The most that was resident counts from now on; False where the system can't do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident_mib() -> tuple[float, float]:
    """Resident memory of this process: the most it has been, and now without garbage."""
    gc.collect()
    return_freed_memory()
    now_mib = psutil.Process().memory_info().rss / MIB
    return max(_most_resident_mib(), now_mib), now_mib


def _most_resident_mib() -> float:
    with suppress(OSError, KeyError):
        # Not ru_maxrss: on Linux a process that was started by a larger one begins with the larger one's.
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        return int(dict(re.findall(r"^(VmHWM):\s*(\d+) kB$", status, re.MULTILINE))["VmHWM"]) / 1024
    return _max_rss_mib()


# How memory is read (the most, and now), how the most alone, and how the most is forgotten.
_RESIDENT = (_resident_mib, _most_resident_mib, _forget_resident)
_CUDA = (_allocated_mib, _most_allocated_mib, _forget_allocated)


def return_freed_memory() -> None:
    """glibc keeps freed memory for later: after a quantization most of the unquantized weights, so that 4-bit
    weights would look larger than those they were made of. (CUDA's figures leave out such memory too.)"""
    with suppress(OSError, AttributeError, TypeError):  # another C library, or another system
        ctypes.CDLL(None).malloc_trim(0)


def _max_rss_mib() -> float:
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


if __name__ == "__main__":
    sys.exit(main())
