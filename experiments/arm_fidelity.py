"""Fidelity of arms, measured: their targets, and their draft models, read the reference's texts and a corpus.

The reference (plain weights, dense cache) reads along, and a second time in passes of another size: how far it is from
itself is what rounding does, the floor of every figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.fidelity import Fidelity, LawDistances
from experiments.point import PreparedPoint
from experiments.strategy import Arm, EngineSettings, build_drafter, build_runner
from experiments.teacher_forcing import ForcedText, Reader, read_together
from specdec.progress import Row
from specdec.runner import ModelRunner
from specdec.sampling import Sampler
from specdec.types import Request

# Tokens per pass of the reference's second reading; the first that isn't the setting's. Fewer than 16: from there on
# the products of a pass are done by one and the same kernel, and rounding would hardly show.
FLOOR_CHUNKS = (8, 4)
REFERENCE, FLOOR = "reference", "floor"
ON_TEXTS, ON_CORPUS = "", "corpus_"
FLOOR_PREFIX = "floor_"


@dataclass(frozen=True)
class PredictedAcceptance:
    """Shares of draft tokens that would stand, if a draft model drafted one at each of `num_positions`.

    `law`: drawn from its law, which both laws' summed minimum says; at the run's temperature, at 1 for a greedy run.
    `greedy`: its most probable token, accepted where it is the target's.
    """

    law: float
    greedy: float
    num_positions: int

    def metrics(self) -> dict[str, float]:
        return {
            "spec/predicted_acceptance": self.law,
            "spec/predicted_acceptance_greedy": self.greedy,
            "spec/predicted_acceptance_n": self.num_positions,
        }


@dataclass(frozen=True)
class ArmFidelity:
    """One arm beside its reference.

    `laws` are by how their metrics begin: on the reference's texts ("") and on the corpus (`corpus_`), each
    with its floor (`floor_`, `corpus_floor_`); empty for an arm that keeps the laws. `acceptance` is of an arm with a
    draft model.
    """

    laws: Mapping[str, Fidelity] = field(default_factory=dict)
    acceptance: PredictedAcceptance | None = None

    def beside_floor(self, prefix: str) -> tuple[Fidelity, Fidelity] | None:
        """The arm's figures and the floor; None where that text was not read."""
        if prefix not in self.laws:
            return None
        return self.laws[prefix], self.laws[prefix + FLOOR_PREFIX]

    @property
    def metrics(self) -> dict[str, float]:
        """By contract name."""
        found = {} if self.acceptance is None else self.acceptance.metrics()
        for prefix, fidelity in self.laws.items():
            found.update(fidelity.metrics(prefix))
        return found


def measure_fidelity(
    points: Mapping[str, PreparedPoint],
    answers: Mapping[int, Sequence[int]],
    with_draft_model: Collection[str],
) -> dict[str, ArmFidelity]:
    """Of the points' strategies, by the same labels; those without a quantized part or a draft model have none.

    Args:
        points: of one engine: target, dtype and prompts are the same.
        answers: what the reference wrote, new tokens by request id; without any, only the corpus is read.
        with_draft_model: labels of those whose drafter has a model, as whoever measured them has seen.
    """
    first = next(iter(points.values()))
    texts = own_texts(first.requests, answers, first.config.fidelity.text_tokens)
    corpus = next((point.corpus for point in points.values() if point.corpus), ())
    lossy_points = {label: point for label, point in points.items() if not point.arms.strategy.keeps_laws}
    drafting = {label: point for label, point in points.items() if texts and label in with_draft_model}
    if not (texts or corpus) or not (lossy_points or drafting):
        return {}
    bench = _Readers(first, texts, corpus)
    targets = {label: bench.target(point) for label, point in lossy_points.items()}
    drafts = {label: bench.draft(point) for label, point in drafting.items()}
    lossy = dict.fromkeys(targets.values())
    of_drafts = {name: targets.get(label, REFERENCE) for label, name in drafts.items()}
    on_texts = bench.read(texts, lossy, of_drafts)
    on_corpus = bench.read(corpus if lossy else (), lossy, {})
    return {
        label: ArmFidelity(
            {
                **_with_floor(ON_TEXTS, targets.get(label), on_texts.laws),
                **_with_floor(ON_CORPUS, targets.get(label), on_corpus.laws),
            },
            on_texts.acceptance.get(drafts.get(label, "")),
        )
        for label in points
        if label in targets or label in drafts
    }


def own_texts(
    requests: Sequence[Request], answers: Mapping[int, Sequence[int]], num_tokens: int
) -> list[ForcedText]:
    """Prompts with their answers, in order, until `num_tokens` new tokens are reached; the last is cut there."""
    texts = []
    for request in requests:
        answer = tuple(answers.get(request.request_id, ()))[:num_tokens]
        if answer:
            texts.append(ForcedText((*request.prompt_ids, *answer), len(request.prompt_ids)))
        num_tokens -= len(answer)
    return texts


def judged(
    sampler: Sampler, row: Row, next_ids: Sequence[int], draft_logits: Tensor, target_logits: Tensor
) -> Tensor:
    """The probability with which one draft token stands at each of N positions, drawn and greedy: `[2, N]`.

    Args:
        sampler: of a temperature above 0; makes the laws of both models from their logits `[N, V]`.
        row: the text before the first position; `next_ids` are its next N tokens.
    """
    behind = torch.tensor([next_ids[:-1]], dtype=torch.long, device=draft_logits.device)
    both = (draft_logits.unsqueeze(0), target_logits.unsqueeze(0))
    law, target_law = (sampler.law(logits, [row], behind) for logits in both)
    top, target_top = (sampler.scores(logits, [row], behind).argmax(-1) for logits in both)
    return torch.stack([1 - target_law.excess(law)[0], (top == target_top)[0].double()])


def _with_floor(prefix: str, target: str | None, laws: Mapping[str, Fidelity]) -> dict[str, Fidelity]:
    if target is None or target not in laws:
        return {}
    return {prefix: laws[target], prefix + FLOOR_PREFIX: laws[FLOOR]}


@dataclass
class _Found:
    """Of some texts, by reader."""

    laws: dict[str, Fidelity] = field(default_factory=dict)
    acceptance: dict[str, PredictedAcceptance] = field(default_factory=dict)


class _Readers:
    """The models that read side by side, built when they are needed; arms of equal parts share one."""

    def __init__(
        self, point: PreparedPoint, texts: Sequence[ForcedText], corpus: Sequence[ForcedText]
    ) -> None:
        self._point = point
        # A draft model reads the texts alone, which it can hold.
        self._draft_capacity = max((len(text.token_ids) for text in texts), default=0)
        self._capacity = max([self._draft_capacity, *(len(text.token_ids) for text in corpus)])
        self._chunk = point.config.fidelity.chunk
        self._readers: dict[str, Reader] = {}
        params = point.settings.sampling
        if params.temperature == 0:
            params = dataclasses.replace(params, temperature=1.0)
        self._sampler = Sampler(params, point.settings.stop_ids)

    def target(self, point: PreparedPoint) -> str:
        """The name of the reader that is the target of a point's strategy."""
        arm = point.arms.strategy
        name = f"target {arm.weights} {arm.kv}"
        if name not in self._readers:
            self._readers[name] = self._target_reader(point, arm, self._chunk)
        return name

    def draft(self, point: PreparedPoint) -> str:
        """The same of the draft model."""
        arm, model = point.arms.strategy, point.config.model
        name = f"draft {arm.drafter} {arm.weights} {arm.kv} {model.draft} {model.draft_revision}"
        if name not in self._readers:
            target = self._reader(self.target(point) if not arm.keeps_laws else REFERENCE).runner
            assert isinstance(target, ModelRunner)
            settings = _alone(point, self._draft_capacity)
            drafter: Any = build_drafter(arm, point.pool, settings, target.cache)
            self._readers[name] = Reader(drafter.runner, self._chunk)
        return name

    def read(
        self, texts: Sequence[ForcedText], targets: Mapping[str, None], drafts: Mapping[str, str]
    ) -> _Found:
        """Laws of `targets` and the floor beside the reference's; acceptance of each draft by its target."""
        if not texts or not (targets or drafts):
            return _Found()
        compared = [FLOOR, *targets] if targets else []
        # A draft on its target's cache reads on from where that is, and so before it.
        names = dict.fromkeys((*drafts, REFERENCE, *compared, *drafts.values()))
        readers = {name: self._reader(name) for name in names}
        laws: dict[str, list[LawDistances]] = {name: [] for name in compared}
        standing: dict[str, list[Tensor]] = {name: [] for name in drafts}
        for request_id, text in enumerate(texts):
            row = Row(Request(request_id, text.token_ids[: text.num_given], text.num_scored), slot=0)
            for window in read_together(readers, text):
                logits = window.logits
                next_ids = torch.tensor(window.next_ids, device=logits[REFERENCE].device)
                ours = [logits[name] for name in compared]
                found = LawDistances.of_logits(logits[REFERENCE], ours, next_ids)
                for name, distances in zip(compared, found, strict=True):
                    laws[name].append(distances)
                for draft, target in drafts.items():
                    stands = judged(self._sampler, row, window.next_ids, logits[draft], logits[target])
                    standing[draft].append(stands)
                row.token_ids.extend(window.next_ids)
        return _Found(
            {name: Fidelity.of(LawDistances.joined(parts)) for name, parts in laws.items()},
            {name: _acceptance(torch.cat(parts, 1)) for name, parts in standing.items()},
        )

    def _reader(self, name: str) -> Reader:
        if name in (REFERENCE, FLOOR) and name not in self._readers:
            chunk = self._chunk
            if name == FLOOR:
                chunk = next(size for size in FLOOR_CHUNKS if size != self._chunk)
            self._readers[name] = self._target_reader(self._point, self._point.arms.plain, chunk)
        return self._readers[name]

    def _target_reader(self, point: PreparedPoint, arm: Arm, chunk: int) -> Reader:
        # Passes of one shape are for bits, not for laws.
        arm = dataclasses.replace(arm, pass_tokens=None)
        return Reader(build_runner(arm, point.pool, _alone(point, self._capacity)), chunk)


def _alone(point: PreparedPoint, capacity: int) -> EngineSettings:
    """The point's settings for one text at a time."""
    return dataclasses.replace(point.settings, num_slots=1, capacity=capacity)


def _acceptance(standing: Tensor) -> PredictedAcceptance:
    law, greedy = standing.mean(1).tolist()
    return PredictedAcceptance(law, greedy, standing.shape[1])
