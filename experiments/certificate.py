"""Is a verifier exact? Its output's law, and the whole decoder's over several blocks, by exact enumeration.

Every outcome of every draw is run through the code that decodes, with its probability (`specdec.enumeration`): what is
left between the output's law and the target's is rounding, or a fault. Two texts follow: cases of one step, on given
pairs of laws, with every draft length; and cases of the whole decoder, on laws that depend on the text, over several
blocks, with draft lengths that depend on the prefix, and with stop tokens inside a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy import stats

from experiments.planted_faults import FAULTS, Fault
from specdec.decoding.base import DecodingParts
from specdec.decoding.speculative import SpeculativeDecoder
from specdec.draft_length.base import DraftLength
from specdec.draft_length.confidence import ConfidenceDraftLength
from specdec.draft_length.fixed import FixedDraftLength
from specdec.drafters.base import Drafter
from specdec.drafters.draft_model import DraftModelDrafter
from specdec.draws import BlockDraws, Draws, KeyedDraws
from specdec.enumeration import law_of, total_variation
from specdec.law_runner import LawOf, LawRunner
from specdec.progress import Row, StopTokens
from specdec.sampling import Sampler
from specdec.types import DraftProposal, Law, Request, SamplingParams
from specdec.verifiers.base import Verifier

EXACT = 1e-9
NUM_DRAWS = 20000
# A right decoder fails the sampling test once in so many runs.
ALARM_RATE = 1e-3
PROMPT = (0, 1)
Matrix = Sequence[Sequence[float]]
TextLaw = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Pair:
    """Laws for one step: the target's at K + 1 positions, the draft's at K; they depend on no text."""

    target: Matrix
    draft: Matrix

    @staticmethod
    def checked(target: Matrix, draft: Matrix) -> Pair:
        """Raises ValueError for laws that aren't, or don't belong together."""
        if len(target) != len(draft) + 1:
            raise ValueError(f"{len(target)} target laws for {len(draft)} draft laws: expected one more")
        sizes = {len(law) for law in (*target, *draft)}
        if len(sizes) != 1:
            raise ValueError(f"laws over vocabularies of {sorted(sizes)} tokens: expected one size")
        for law in (*target, *draft):
            if min(law) < 0 or abs(sum(law) - 1) > 1e-6:
                raise ValueError(f"{list(law)} is no law: expected probabilities that sum to 1")
        return Pair(target, draft)


# Two tokens with unequal excess of target over draft, one far below: a wrong residual shows.
BUILT_IN_PAIRS = (
    Pair([[0.40, 0.25, 0.35], [0.20, 0.50, 0.30]], [[0.80, 0.15, 0.05]]),
    Pair(
        [[0.40, 0.25, 0.35], [0.20, 0.50, 0.30], [0.55, 0.15, 0.30]],
        [[0.80, 0.15, 0.05], [0.60, 0.10, 0.30]],
    ),
    Pair(
        [[0.40, 0.25, 0.35], [0.40, 0.25, 0.35], [0.40, 0.25, 0.35], [0.40, 0.25, 0.35]],
        [[0.80, 0.15, 0.05], [0.80, 0.15, 0.05], [0.80, 0.15, 0.05]],
    ),
    Pair(
        [[0.0, 0.7, 0.3], [0.0, 0.2, 0.8], [0.3, 0.3, 0.4]],
        [[0.9, 0.05, 0.05], [0.5, 0.3, 0.2]],
    ),
    Pair([[1 - 2e-9, 1e-9, 1e-9], [1e-9, 1 - 2e-9, 1e-9]], [[1e-9, 1e-9, 1 - 2e-9]]),
)


def read_pairs(path: Path) -> list[Pair]:
    """JSON lines of `{"target": [[..], ..], "draft": [[..], ..]}`. Raises ValueError that names the line."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                found = json.loads(line)
                pairs.append(Pair.checked(found["target"], found["draft"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not pairs:
        raise ValueError(f"{path}: no pairs")
    return pairs


@dataclass(frozen=True)
class LawCheck:
    """The largest total variation between an output's law and the target's, over so many cases."""

    max_tv: float
    cases: int

    @staticmethod
    def of(deviations: Iterator[float]) -> LawCheck:
        found = list(deviations)
        return LawCheck(max(found), len(found))

    @property
    def is_exact(self) -> bool:
        return self.max_tv <= EXACT


def check_verifier(verifier: Verifier, pairs: Sequence[Pair]) -> LawCheck:
    """Over all pairs with every draft length, and over the decoder's cases."""
    return LawCheck.of(_deviations(Fault(verifier), pairs))


def check_faults() -> dict[str, LawCheck]:
    """What the built-in cases show of each planted fault: caught is what is not exact."""
    return {name: LawCheck.of(_deviations(fault, BUILT_IN_PAIRS)) for name, fault in FAULTS.items()}


@dataclass(frozen=True)
class SamplingCheck:
    """A chi-square test of texts that the whole decoder sampled with the engine's own keyed draws.

    `power` is the probability of an alarm where the law is wrong by 0.05 in total variation, wherever it is wrong.
    """

    p_value: float
    draws: int
    power: float


def check_sampling(verifier: Verifier, num_draws: int = NUM_DRAWS, seed: int = 0) -> SamplingCheck:
    """Sample texts of four tokens, in batches, and compare their counts with the exact law."""
    texts = _sampled_texts(verifier, num_draws, seed)
    law = _text_law(_target_law, 4)
    expected = [num_draws * mass for mass in law.values()]
    observed = [texts.count(text) for text in law]
    freedom = len(law) - 1
    # The least that a total variation of 0.05 moves the statistic: spread in proportion to the law.
    shift = num_draws * (2 * 0.05) ** 2
    power = 1 - stats.ncx2.cdf(stats.chi2.ppf(1 - ALARM_RATE, freedom), freedom, shift)
    return SamplingCheck(float(stats.chisquare(observed, expected).pvalue), num_draws, float(power))


def _deviations(fault: Fault, pairs: Sequence[Pair]) -> Iterator[float]:
    for pair in pairs:
        for width in range(1, len(pair.draft) + 1):
            for length in range(width + 1):
                yield _one_step_deviation(fault, pair, width, length)
    policies: list[DraftLength] = [FixedDraftLength(1), FixedDraftLength(2), ConfidenceDraftLength(2, 0.55)]
    for policy in policies:
        for stop_ids in ((), (1,)):
            yield _decoder_deviation(fault, policy, stop_ids)
    yield _decoder_deviation(fault, FixedDraftLength(3), ())


def _one_step_deviation(fault: Fault, pair: Pair, width: int, length: int) -> float:
    """Draft `length` of `width` tokens, verify, and complete with the target's own: a text of `width` + 1 tokens."""
    size = len(pair.target[0])

    def run(draws: Draws) -> tuple[int, ...]:
        block = BlockDraws.of(draws, [0], [5], torch.device("cpu"), fault.verifier.shares_noise)
        drafter: Drafter = _DrawsFrom(pair.draft[:width], length)
        if fault.drafter is not None:
            drafter = fault.drafter(drafter)  # type: ignore[call-arg]
        row = Row(Request(0, (0,) * 5, width + 1), 0)
        proposal = drafter.propose([row], [width], lambda logits, step: [True], block)
        target = Law(probs=torch.tensor([pair.target[: width + 1]], dtype=torch.float64))
        verification = fault.verifier.verify(proposal, target, block)
        kept = verification.accepted[0]
        return (*proposal.token_ids[0, :kept].tolist(), verification.next_ids[0])

    whole: TextLaw = {}
    for text, mass in law_of(run).items():
        for ended, share in _continued(text, pair.target[: width + 1], size):
            whole[ended] = whole.get(ended, 0.0) + mass * share
    return total_variation(whole, dict(_continued((), pair.target[: width + 1], size)))


class _DrawsFrom(Drafter):
    """Draws from given laws, whatever the text is."""

    def __init__(self, laws: Matrix, length: int) -> None:
        self._laws = Law(probs=torch.tensor([laws], dtype=torch.float64))
        self._width, self._length = len(laws), length

    def propose(
        self, rows: Sequence[Row], limits: Sequence[int], go_on: object, draws: BlockDraws
    ) -> DraftProposal:
        token_ids = torch.zeros(1, self._width, dtype=torch.long)
        for offset in range(self._length):
            token_ids[:, offset] = draws.draft(self._laws.at(offset), offset)
        return DraftProposal(token_ids, (self._length,), self._laws)


def _continued(text: tuple[int, ...], laws: Matrix, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All whole texts that begin with `text`, with the probability of the rest."""
    texts: TextLaw = {text: 1.0}
    for position in range(len(text), len(laws)):
        texts = {
            (*head, token): mass * laws[position][token]
            for head, mass in texts.items()
            for token in range(size)
        }
    yield from texts.items()


# The decoder's cases: laws of the last two tokens.


def _target_law(text: Sequence[int]) -> Sequence[float]:
    return [[0.3, 0.7], [0.85, 0.15], [0.6, 0.4]][(text[-1] + 2 * text[-2]) % 3]


def _draft_law(text: Sequence[int]) -> Sequence[float]:
    return [[0.6, 0.4], [0.5, 0.5], [0.1, 0.9]][(2 * text[-1] + text[-2]) % 3]


def _decoder_deviation(fault: Fault, draft_length: DraftLength, stop_ids: Sequence[int]) -> float:
    def run(draws: Draws) -> tuple[int, ...]:
        decoder = _decoder(fault, draft_length, draws, 1, stop_ids)
        (text,) = _texts(decoder, [Request(0, PROMPT, 4)])
        return text

    expected: TextLaw = {}
    for text, mass in _text_law(_target_law, 4).items():
        end = next((i + 1 for i, token in enumerate(text) if token in stop_ids), len(text))
        expected[text[:end]] = expected.get(text[:end], 0.0) + mass
    return total_variation(law_of(run), expected)


def _decoder(
    fault: Fault, draft_length: DraftLength, draws: Draws, num_slots: int, stop_ids: Sequence[int]
) -> SpeculativeDecoder:
    sampler = Sampler(SamplingParams(1.0))
    drafter: Drafter = DraftModelDrafter(LawRunner(_draft_law, 2, num_slots), sampler)
    if fault.drafter is not None:
        drafter = fault.drafter(drafter)  # type: ignore[call-arg]
    parts = DecodingParts(
        LawRunner(_target_law, 2, num_slots),
        sampler,
        draws,
        StopTokens(stop_ids),
        num_slots,
        drafter=drafter,
        verifier=fault.verifier,
        draft_length=draft_length,
    )
    return SpeculativeDecoder(parts)


def _texts(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    texts: dict[int, list[int]] = {}
    for step in decoder.generate(requests):
        for request_id, tokens in zip(step.request_ids, step.committed, strict=True):
            texts.setdefault(request_id, []).extend(tokens)
    return [tuple(texts[request.request_id]) for request in requests]


def _sampled_texts(verifier: Verifier, num_draws: int, seed: int) -> list[tuple[int, ...]]:
    num_slots = 250
    decoder = _decoder(Fault(verifier), FixedDraftLength(2), KeyedDraws(seed), num_slots, ())
    requests = [Request(number, PROMPT, 4) for number in range(num_draws)]
    return [
        text
        for start in range(0, num_draws, num_slots)
        for text in _texts(decoder, requests[start : start + num_slots])
    ]


def _text_law(law: LawOf, num_tokens: int) -> TextLaw:
    """The law of the first tokens behind the prompt under plain sampling, by hand."""
    texts: TextLaw = {(): 1.0}
    for _ in range(num_tokens):
        texts = {
            (*text, token): mass * prob
            for text, mass in texts.items()
            for token, prob in enumerate(law([*PROMPT, *text]))
        }
    return texts
