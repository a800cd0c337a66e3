"""From tokens to text as they come: pieces that are final, each of one kind.

Tokens are decoded within a window (the tokens of the piece before, then the new ones), since some tokens only make a
character together, and some decoders begin a text otherwise than they go on. Knows no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from specdec.types import TokenKind

# What a decoder gives for bytes that are no character, or not yet one.
UNREADABLE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Piece:
    """Text that will not change any more, and the kind of the token that completed it."""

    text: str
    kind: TokenKind


class TokenStream:
    """The text of one answer. Special tokens are not shown, nor is the stop string that ends it.

    Held back, until more tokens come or the answer is over: bytes that are no character yet, and what may be the
    beginning of a stop string.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._token_ids: list[int] = []
        self._window = self._read = 0
        self._newest = TokenKind.PLAIN
        self._held: list[Piece] = []

    def push(self, token_ids: Sequence[int], kinds: Sequence[TokenKind]) -> list[Piece]:
        """The pieces that these tokens complete."""
        for token, kind in zip(token_ids, kinds, strict=True):
            self._token_ids.append(token)
            self._newest = kind
            text = self._unread()
            if not text.endswith(UNREADABLE):
                self._hold(text)
        ready, self._held = split(self._held, self._num_final())
        return ready

    def end(self) -> list[Piece]:
        """The answer is over: what was held back, without the stop string."""
        self._hold(self._unread())
        ready, _ = split(self._held, self._stop_start())
        self._held = []
        return ready

    def _unread(self) -> str:
        before = self._decode(self._token_ids[self._window : self._read])
        return self._decode(self._token_ids[self._window :])[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _hold(self, text: str) -> None:
        if text:  # else the window stays: the next token may not go on from a special one
            self._held.append(Piece(text, self._newest))
            self._window, self._read = self._read, len(self._token_ids)

    def _num_final(self) -> int:
        """Characters of the held text that can't be part of a stop string."""
        text = text_of(self._held)
        beginnings = [
            len(text) - length
            for stop in self._stops
            for length in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:length])
        ]
        return min([self._stop_start(), *beginnings])

    def _stop_start(self) -> int:
        """Where the first stop string begins in the held text; its length where there is none."""
        text = text_of(self._held)
        return min([text.find(stop) for stop in self._stops if stop in text], default=len(text))


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def split(pieces: Sequence[Piece], num_characters: int) -> tuple[list[Piece], list[Piece]]:
    """The first so many characters of the pieces, and the rest."""
    first, rest = [], []
    for piece in pieces:
        room = max(0, num_characters)
        first.append(Piece(piece.text[:room], piece.kind))
        rest.append(Piece(piece.text[room:], piece.kind))
        num_characters -= len(piece.text)
    return [piece for piece in first if piece.text], [piece for piece in rest if piece.text]
