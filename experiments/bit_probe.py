"""Does a token get the same logits, bit for bit, wherever it stands in a pass? Asked before a run promises it.

What a library's kernels promise is little: with two threads a float32 product of torch rounds the rows beyond a
multiple of 4 otherwise. So the model itself is asked: a text
is read several times, with each of its tokens at each place of a pass once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.runner import Runner

CONTEXT = 24


def check_bits(runner: Runner, pass_tokens: int, num_slots: int, capacity: int) -> None:
    """Leaves the runner empty. Where its `capacity` is small the text is, and at last the part of a pass that is asked.

    Raises ValueError, in one line, where a token's logits depend on its place in the pass.
    """
    asked = min(pass_tokens, capacity - 1)
    context = min(CONTEXT, capacity - asked)
    text = [(7 * number + 3) % 50 % runner.vocab_size for number in range(context + asked)]
    whole = _last_block(runner, text, context, num_slots, read_before=0)
    for place in range(1, asked):
        shifted = _last_block(runner, text, context, num_slots, read_before=place)
        if not torch.equal(whole[:, place:], shifted):
            difference = float((whole[:, place:] - shifted).abs().max())
            raise ValueError(
                f"exactness=bitwise can't be promised: logits move by up to {difference:.2g} with a token's place in "
                f"a pass of {num_slots} x {pass_tokens} tokens; try "
                f"exactness.pass_tokens={_next_multiple(pass_tokens)}, threads=1, dtype=bf16 or another weight format"
            )


def _last_block(runner: Runner, text: list[int], context: int, num_slots: int, read_before: int) -> Tensor:
    """Logits behind the last tokens of the text, the first `read_before` of the last block read one by one."""
    rows = range(num_slots)
    runner.prefill([text[:context]] * num_slots, list(rows))
    for number in range(read_before):
        runner.decode(torch.tensor([[text[context + number]]] * num_slots, device=runner.device))
        runner.commit([context + number + 1] * num_slots)
    rest = text[context + read_before :]
    tokens = torch.tensor([rest] * num_slots, device=runner.device)
    logits = runner.verify(tokens, [len(rest)] * num_slots)
    for slot in rows:
        runner.release(slot)
    return logits


def _next_multiple(pass_tokens: int) -> int:
    return (pass_tokens // 4 + 1) * 4
