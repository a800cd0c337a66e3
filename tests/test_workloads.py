"""Workloads read real files; the tokenizer is a word-level one whose ids can be counted by hand."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from experiments.workloads.base import Prompt, WorkloadContext, WorkloadOptions, encode, take_prompts
from experiments.workloads.embedded import PROMPTS_FILE, EmbeddedWorkload
from experiments.workloads.hf import HfWorkload
from experiments.workloads.jsonl import JsonlWorkload
from experiments.workloads.random import RandomWorkload

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTEXT = WorkloadContext(vocab_size=50, seed=3)
CATEGORIES = {
    "chat",
    "code",
    "summarization",
    "translation",
    "question_answering",
    "maths",
    "extraction",
    "retrieval",
}
WORKLOADS: list[WorkloadOptions] = [
    EmbeddedWorkload(),
    JsonlWorkload(path="prompts.jsonl"),
    HfWorkload(dataset="owner/name"),
    RandomWorkload(),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def one_line_error(error: pytest.ExceptionInfo[ValueError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# --- contract of every workload ---


@pytest.mark.parametrize("options", WORKLOADS, ids=lambda options: type(options).__name__)
@pytest.mark.parametrize("option", ["limit", "max_new_tokens"])
def test_counts_below_one_are_refused(options: WorkloadOptions, option: str) -> None:
    with pytest.raises(ValueError, match=rf"workload\.{option}=0 .* at least 1") as error:
        dataclasses.replace(options, **{option: 0})
    one_line_error(error)


@pytest.mark.parametrize("options", WORKLOADS, ids=lambda options: type(options).__name__)
def test_options_are_a_structured_config(options: WorkloadOptions) -> None:
    OmegaConf.structured(type(options))
    config = OmegaConf.merge(OmegaConf.structured(options), {"limit": 5})
    assert OmegaConf.to_object(config) == dataclasses.replace(options, limit=5)


# --- base ---


@pytest.mark.parametrize(("text", "token_ids"), [(None, None), ("both", (1,))])
def test_prompt_has_either_text_or_ids(text: str | None, token_ids: tuple[int, ...] | None) -> None:
    with pytest.raises(ValueError, match="'x' needs exactly one"):
        Prompt("x", "none", text, token_ids)


def test_context_refuses_an_empty_vocabulary() -> None:
    with pytest.raises(ValueError, match="vocab_size=0"):
        WorkloadContext(vocab_size=0, seed=0)


def test_take_prompts_stops_at_the_limit() -> None:
    source = (Prompt(str(index), "none", "text") for index in range(3))
    assert [prompt.prompt_id for prompt in take_prompts(source, 2, "source")] == ["0", "1"]
    assert next(source).prompt_id == "2"


def test_take_prompts_refuses_an_empty_source() -> None:
    with pytest.raises(ValueError, match="source holds no prompts"):
        take_prompts([], 2, "source")


def test_take_prompts_refuses_a_repeated_id() -> None:
    with pytest.raises(ValueError, match="source has the prompt id 'x' twice"):
        take_prompts([Prompt("x", "none", "a"), Prompt("x", "none", "b")], 2, "source")


# --- encode ---


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "user": 2, "assistant": 3, ":": 4, "hello": 5, "world": 6}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")


def test_encode_without_a_template_adds_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode(Prompt("x", "none", "hello world"), tokenizer) == [1, 5, 6]


def test_encode_with_a_template_is_one_user_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    assert encode(Prompt("x", "none", "hello world"), tokenizer) == [2, 4, 5, 6, 3, 4]


def test_encode_passes_token_ids_through(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    assert encode(Prompt("x", "none", token_ids=(6, 6, 5)), tokenizer) == [6, 6, 5]


def test_encode_refuses_no_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ '' }}"
    for empty in (Prompt("none-7", "none", token_ids=()), Prompt("none-7", "none", "hello")):
        with pytest.raises(ValueError, match="'none-7' encodes to no tokens"):
            encode(empty, tokenizer)


# --- embedded ---


def test_embedded_covers_all_categories_early() -> None:
    prompts = EmbeddedWorkload(limit=12).load(CONTEXT)
    assert len(prompts) == 12
    assert {prompt.category for prompt in prompts} == CATEGORIES


def test_embedded_is_large_and_balanced() -> None:
    prompts = EmbeddedWorkload(limit=1000).load(CONTEXT)
    counts = Counter(prompt.category for prompt in prompts)
    assert len(prompts) >= 40
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 6
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_embedded_file_is_well_formed() -> None:
    records = [json.loads(line) for line in PROMPTS_FILE.read_text(encoding="utf-8").splitlines()]
    for record in records:
        assert list(record) == ["id", "category", "prompt", "copy_heavy"]
        assert 15 <= len(record["prompt"].split()) <= 380
    assert 0.3 < sum(record["copy_heavy"] for record in records) / len(records) < 0.7


# --- jsonl ---


def load_lines(path: Path, **options: Any) -> list[Prompt]:
    return JsonlWorkload(path=str(path), **options).load(CONTEXT)


def test_jsonl_reads_unlike_records(tmp_path: Path) -> None:
    records = [
        {"prompt": "first", "id": 7, "category": "chat"},
        {"turns": ["second", "ignored"], "question_id": "b", "extra": {"deep": [1]}},
        {"prompt": "third", "id": None, "category": None, "turns": None},
        {"id": "both", "question_id": 9, "prompt": "fourth", "turns": ["ignored"]},
    ]
    assert load_lines(write_lines(tmp_path / "odd [name]*.jsonl", records)) == [
        Prompt("7", "chat", "first"),
        Prompt("b", "none", "second"),
        Prompt("3", "none", "third"),
        Prompt("both", "none", "fourth"),
    ]


def test_jsonl_counts_blank_lines_and_ignores_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'.encode())
    assert load_lines(path) == [Prompt("1", "none", "a\u2028b"), Prompt("3", "none", "c")]


def test_jsonl_sees_a_changed_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "old"}])
    assert load_lines(path)[0].text == "old"
    write_lines(path, [{"prompt": "new"}])
    assert load_lines(path)[0].text == "new"


def test_jsonl_reads_no_further_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{broken\n', encoding="utf-8")
    assert len(load_lines(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', "line 2: broken JSON"),
        ('["b"]', "line 2: expected a JSON object, got list"),
        ('{"text": "b", "id": 4}', "line 2: neither 'prompt' nor 'turns' given .*text, id"),
        ("{}", "line 2: neither 'prompt' nor 'turns' given .*none"),
        ('{"turns": []}', "line 2: neither 'prompt' nor 'turns' given"),
        ('{"prompt": " "}', "line 2: the prompt must be text that is not blank"),
        ('{"turns": [3]}', "line 2: the prompt must be text that is not blank, got 3"),
        ('{"prompt": "b", "id": "1"}', "prompt id '1' twice"),
    ],
)
def test_jsonl_refuses_a_bad_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        load_lines(path)
    assert "prompts.jsonl" in one_line_error(error)


def test_jsonl_refuses_what_is_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    cases = {
        "missing": "does not exist",
        "": "is a folder",
        "empty": "holds no prompts",
        "binary": "not UTF-8",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            load_lines(tmp_path / name)
        one_line_error(error)


def test_jsonl_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"workload\.path=''"):
        JsonlWorkload()


# --- hf ---

TEXTS = [{"ask": "first", "category": "chat"}, {"ask": ""}, {"ask": "third", "category": None}]


def load_dataset_folder(folder: Path, **options: Any) -> list[Prompt]:
    return HfWorkload(dataset=str(folder), **{"field": "ask", **options}).load(CONTEXT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "train.jsonl", TEXTS)
    write_lines(folder / "test.jsonl", [{"ask": f"test {index}"} for index in range(5)])
    return folder


def test_hf_reads_a_folder_of_json_lines(folder: Path) -> None:
    assert load_dataset_folder(folder) == [
        Prompt("train-0", "chat", "first"),
        Prompt("train-2", "none", "third"),
    ]
    assert [prompt.text for prompt in load_dataset_folder(folder, split="test", limit=2)] == [
        "test 0",
        "test 1",
    ]


def test_hf_sees_a_changed_file(folder: Path) -> None:
    load_dataset_folder(folder)
    write_lines(folder / "train.jsonl", [{"ask": "new"}])
    assert [prompt.text for prompt in load_dataset_folder(folder)] == ["new"]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_hf_reads_a_folder_of_tables(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.table({"ask": ["one", "two"]})
    write = {"csv": csv.write_csv, "parquet": parquet.write_table}[suffix]
    write(table, str(tmp_path / f"train.{suffix}"))
    assert [prompt.text for prompt in load_dataset_folder(tmp_path)] == ["one", "two"]


def test_hf_reads_saved_datasets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_dict({"ask": ["one", "two"]})
    rows.save_to_disk(str(tmp_path / "single"))
    DatasetDict({"train": rows, "dev": rows}).save_to_disk(str(tmp_path / "splits"))
    assert [prompt.text for prompt in load_dataset_folder(tmp_path / "single", limit=1)] == ["one"]
    assert len(load_dataset_folder(tmp_path / "splits", split="dev")) == 2
    with pytest.raises(ValueError, match="no split 'test'; its splits: train, dev"):
        load_dataset_folder(tmp_path / "splits", split="test")
    with pytest.raises(ValueError, match="no configurations, got name 'main'"):
        load_dataset_folder(tmp_path / "splits", subset="main")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (["one", "two"], "one"),
        ([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}], "hi"),
    ],
)
def test_hf_takes_the_first_turn(tmp_path: Path, cell: Any, text: str) -> None:
    write_lines(tmp_path / "train.jsonl", [{"ask": cell}])
    assert [prompt.text for prompt in load_dataset_folder(tmp_path)] == [text]


@pytest.mark.parametrize("cell", [3, [], [4], {"a": "b"}, [{"role": "assistant", "content": "hi"}]])
def test_hf_refuses_a_cell_without_text(tmp_path: Path, cell: Any) -> None:
    write_lines(tmp_path / "train.jsonl", [{"ask": cell}])
    with pytest.raises(ValueError, match=r"workload\.field='ask', row 0: expected text") as error:
        load_dataset_folder(tmp_path)
    one_line_error(error)


def test_hf_names_unknown_parts_and_lists_known_ones(folder: Path) -> None:
    cases = {
        ("split", "dev"): "no split 'dev'; its splits: train, test",
        ("field", "prompt"): "no workload.field='prompt'; its columns: ask, category",
        ("subset", "german"): "'german' not found. Available: .'default'.",
    }
    for (option, value), message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            load_dataset_folder(folder, **{option: value})
        assert str(folder) in one_line_error(error)


def test_hf_refuses_unreadable_data(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"ask": "a"}\n{broken\n', encoding="utf-8")
    cases = {
        "missing": "no such folder",
        "empty": "contain any data files",
        "broken": "JSON parse error",
        "broken/train.jsonl": "it is a file; .* workload=jsonl",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=f"cannot be read: .*{message}") as error:
            load_dataset_folder(tmp_path / name)
        assert name in one_line_error(error)


def test_hf_turns_a_network_failure_into_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'owner/name' .*cannot be read: no route to the hub") as error:
        HfWorkload(dataset="owner/name").load(CONTEXT)
    one_line_error(error)


@pytest.mark.parametrize("option", ["dataset", "split", "field"])
def test_hf_needs_its_names(option: str) -> None:
    named: WorkloadOptions = HfWorkload(dataset="owner/name")
    blank: dict[str, Any] = {option: ""}
    with pytest.raises(ValueError, match=f"workload.{option}=''"):
        dataclasses.replace(named, **blank)


# --- random ---


def test_random_prompts_follow_the_seed() -> None:
    options = RandomWorkload(limit=4, prompt_tokens=200)
    prompts = options.load(CONTEXT)
    assert [prompt.prompt_id for prompt in prompts] == ["random-0", "random-1", "random-2", "random-3"]
    assert prompts == options.load(WorkloadContext(vocab_size=50, seed=3))
    assert prompts != options.load(WorkloadContext(vocab_size=50, seed=4))
    assert len({prompt.token_ids for prompt in prompts}) == 4


def test_random_ids_lie_in_the_vocabulary() -> None:
    (prompt,) = RandomWorkload(limit=1, prompt_tokens=500).load(WorkloadContext(vocab_size=7, seed=0))
    assert prompt.token_ids is not None
    assert len(prompt.token_ids) == 500
    # Missing one of 7 ids in 500 draws has a chance of 7 * (6/7)**500, below 1e-32.
    assert set(prompt.token_ids) == set(range(7))


def test_a_larger_limit_keeps_the_earlier_random_prompts() -> None:
    assert RandomWorkload(limit=5).load(CONTEXT)[:2] == RandomWorkload(limit=2).load(CONTEXT)


def test_random_refuses_empty_prompts() -> None:
    with pytest.raises(ValueError, match=r"workload\.prompt_tokens=0 .* at least 1"):
        RandomWorkload(prompt_tokens=0)
