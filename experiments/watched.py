"""One arm while somebody watches it answer: stepped from outside, on a clock of its own.

The clock runs while the arm computes and at no other time, so neither drawing nor the arm beside it is in any figure;
the figures are those of every measurement, functions of one event trace.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from experiments.measure import no_garbage_collection, warm_up
from experiments.metrics import arm_metrics
from experiments.point import PreparedPoint
from experiments.recorder import Clock
from experiments.sampling import StopStrings
from experiments.timed import time_parts
from experiments.token_stream import Piece, TokenStream
from experiments.trace import Trace
from specdec.generation import end_of_text_ids
from specdec.types import TokenKind


class Stopwatch:
    """Seconds in which it was running."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._passed_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        return self._passed_s + (0.0 if self._since_s is None else self._clock() - self._since_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._since_s = self._clock()
        try:
            yield
        finally:
            self._passed_s, self._since_s = self(), None


class Watched:
    """A point's strategy at the first of its requests.

    Loads the models and warms up, on texts that are not the question's; then each `step` makes one step of the decoder.
    `pieces` is the text so far, `kinds` counts its tokens by kind. Raises UnfitPartsError where parts don't fit.
    """

    def __init__(self, label: str, point: PreparedPoint, clock: Clock = time.perf_counter) -> None:
        self.label = label
        self.point = point
        (self.request,) = point.requests
        self.pieces: list[Piece] = []
        self.token_ids: list[int] = []
        self.kinds: Counter[TokenKind] = Counter()
        self.end: str | None = None
        decoder = point.entry(point.arms.strategy).build()
        rounds = point.config.measure.warmup
        self.is_settled = rounds == 0 or warm_up(decoder, [[self.request]], rounds, clock)
        self._settings = point.settings
        self._stream = TokenStream(point.pool.tokenizer, point.config.sampling.stop)
        self.clock = Stopwatch(clock)
        self._recorder = time_parts(decoder, self.clock)
        self._steps = decoder.generate([self.request])

    def step(self) -> None:
        """One step: 1 or more tokens, then `end` says why there will be no more, or is None."""
        with self.clock.running():
            start_s = self.clock()
            output = next(self._steps)
            end_s = self.clock()
        self._recorder.add_step(start_s, end_s, output)
        (token_ids,), kinds = output.committed, output.kinds(0)
        self.token_ids.extend(token_ids)
        self.kinds.update(kinds)
        if output.finished[0]:
            self._steps = iter(())
            self.end = self._why_ended()
        is_stop = self.end is not None and token_ids[-1] in self._settings.stop_ids
        shown = len(token_ids) - is_stop
        self.pieces += self._stream.push(token_ids[:shown], kinds[:shown])
        if self.end is not None:
            self.pieces += self._stream.end()

    def stop(self) -> None:
        """Not to be asked again; what was held back of the text is given."""
        if self.end is None:
            self._steps = iter(())
            self.pieces += self._stream.end()
            self.end = "interrupt"

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        return self._recorder.trace(self.label, 0, 0, 0.0, self.clock())

    @property
    def metrics(self) -> dict[str, float]:
        """By contract name; those of the steps so far."""
        return arm_metrics([self.trace]) if self.token_ids else {}

    def _why_ended(self) -> str:
        config, last = self.point.config, self.token_ids[-1]
        end_of_text = end_of_text_ids(self.point.pool.target(self.point.arms.strategy.weights))
        if last in self._settings.stop_ids:
            return "end of text" if last in end_of_text else f"stop token {last}"
        for stop in config.sampling.stop:
            rule = StopStrings((stop,), self.point.pool.tokenizer)
            if rule.first_end(self.token_ids, len(self.token_ids) - 1) is not None:
                return f"stop string {stop!r}"
        return f"limit of {len(self.token_ids)} tokens (workload.max_new_tokens)"


def race(arms: Sequence[Watched], on_step: Callable[[], None]) -> None:
    """All arms to the ends of their answers, in turn: the next step is that of the arm whose own clock is behind.

    So after every step the arms stand about where they would if each had computed alone for the same time.
    """
    try:
        with no_garbage_collection():
            while unfinished := [arm for arm in arms if arm.end is None]:
                min(unfinished, key=lambda arm: arm.clock()).step()
                on_step()
    finally:
        for arm in arms:
            arm.stop()
