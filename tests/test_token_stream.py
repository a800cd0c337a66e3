"""Text that comes token by token: whole characters, no special tokens, no stop string, each piece once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from experiments.token_stream import UNREADABLE, Piece, TokenStream, split, text_of
from specdec.types import TokenKind

KINDS = list(TokenKind)
TEXT = "naïve  [bold]x[/bold]: 漢字\n\t🙂👩‍👩‍👧 ¡ñ! end "


def byte_tokens() -> PreTrainedTokenizerFast:
    """A token for each byte, and a special one that no text has."""
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def fallback_tokens() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma have them: words that begin with a mark for the space, and bytes where there is no word."""
    words = ["▁the", "▁cat", "s", "▁", "é"]
    vocabulary = {
        token: number for number, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def streamed(
    tokenizer: PreTrainedTokenizerFast,
    token_ids: Sequence[int],
    sizes: Iterable[int],
    stops: Sequence[str] = (),
) -> list[list[Piece]]:
    """What each block of so many tokens gave, and the end."""
    stream, found, start = TokenStream(tokenizer, stops), [], 0
    for size in sizes:
        block = token_ids[start : start + size]
        found.append(stream.push(block, [KINDS[token % 4] for token in block]))
        start += size
    return [*found, stream.end()]


def texts(found: Sequence[Sequence[Piece]]) -> list[str]:
    return [text_of(pieces) for pieces in found]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_any_size_give_the_whole_text_in_whole_characters(seed: int) -> None:
    tokenizer, draw = byte_tokens(), random.Random(seed)
    token_ids = tokenizer.encode(TEXT)
    assert len(token_ids) > len(TEXT)  # some characters are several tokens
    sizes = [draw.randint(1, 5) for _ in token_ids]
    found = streamed(tokenizer, token_ids, sizes)
    assert "".join(texts(found)) == TEXT
    assert UNREADABLE not in "".join(texts(found))
    assert found[-1] == []


def test_a_character_is_of_the_kind_of_the_token_that_completes_it() -> None:
    tokenizer = byte_tokens()
    stream = TokenStream(tokenizer)
    first, second = tokenizer.encode("é")
    assert stream.push([first], [TokenKind.ACCEPTED]) == []
    assert stream.push([second], [TokenKind.BONUS]) == [Piece("é", TokenKind.BONUS)]


def test_bytes_that_are_no_character_come_at_the_end_as_they_decode() -> None:
    tokenizer = byte_tokens()
    token_ids = [*tokenizer.encode("ab"), *tokenizer.encode("漢")[:2]]
    assert texts(streamed(tokenizer, token_ids, [1] * 4)) == ["a", "b", "", "", UNREADABLE]
    token_ids = [*tokenizer.encode("漢")[:2], *tokenizer.encode("ab")]
    assert texts(streamed(tokenizer, token_ids, [1] * 4)) == ["", "", f"{UNREADABLE}a", "b", ""]


def test_a_decoder_that_begins_otherwise_than_it_goes_on() -> None:
    tokenizer = fallback_tokens()
    tokens = ["▁the", "▁cat", "s", "<0xC3>", "<0xA9>", "<0xE6>", "<0xBC>", "<0xA2>"]
    token_ids = [tokenizer.get_vocab()[token] for token in tokens]
    found = texts(streamed(tokenizer, token_ids, [1] * 8))
    assert found == ["the", " cat", "s", "", "é", "", "", "漢", ""]
    assert "".join(found) == tokenizer.decode(token_ids)


def test_special_tokens_are_not_shown_and_change_nothing_behind_them() -> None:
    tokenizer = byte_tokens()
    end = tokenizer.eos_token_id
    token_ids = [end, *tokenizer.encode("a"), end, *tokenizer.encode("é b"), end]
    found = streamed(tokenizer, token_ids, [1] * len(token_ids))
    assert texts(found) == ["", "a", "", "", "é", " ", "b", "", ""]


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one; two", [";"], "one"),
        ("a STO STOP b", ["STOP"], "a STO "),
        ("a STO", ["STOP"], "a STO"),  # the limit came first
        ("abcabd", ["abd"], "abc"),
        ("aab", ["ab"], "a"),
        ("x\n\n\ny", ["\n\n", "nothing"], "x"),
        ("漢字é!", ["字é"], "漢"),
    ],
)
def test_a_stop_string_is_held_back_and_not_shown(text: str, stops: list[str], shown: str) -> None:
    tokenizer = byte_tokens()
    for size in (1, 2, 100):
        token_ids = tokenizer.encode(text)
        found = texts(streamed(tokenizer, token_ids, [size] * len(token_ids), stops))
        assert "".join(found) == shown


def test_what_can_not_be_a_stop_string_is_not_held_back() -> None:
    tokenizer = byte_tokens()
    found = texts(streamed(tokenizer, tokenizer.encode("a STx"), [1] * 5, ["STOP"]))
    assert found == ["a", " ", "", "", "STx", ""]


def test_pieces_are_split_between_characters() -> None:
    pieces = [Piece("ab", TokenKind.ACCEPTED), Piece("cde", TokenKind.BONUS)]
    assert split(pieces, 3) == (
        [Piece("ab", TokenKind.ACCEPTED), Piece("c", TokenKind.BONUS)],
        [Piece("de", TokenKind.BONUS)],
    )
    assert split(pieces, 0) == ([], pieces)
    assert split(pieces, 5) == (pieces, [])
