"""How far a strategy's laws are from the reference's, position by position: pure functions of log-probabilities.

Laws are those of the raw logits at temperature 1, whatever the run samples with. Sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.metrics import MIN_SAMPLES_P99

# Positions at a time: temporaries beyond a few MB take longer to get than to fill.
ROWS = 2


def log_probs(logits: Tensor) -> Tensor:
    """Logits `[N, V]` as log-probabilities in float64, in which equal laws differ by nothing else than rounding."""
    return torch.log_softmax(logits.double(), -1)


@dataclass(frozen=True)
class LawDistances:
    """What is kept of each position, `[N]` each: two laws over the vocabulary come down to a few numbers.

    `kl_nats` is KL(reference || strategy), `overlap` the summed minimum of both laws (1 - total variation: what a draft
    token of one is accepted with by the other; Leviathan et al. 2023, section 3.2). `is_same_top`: the same token is
    the most probable one. `is_right`, `reference_is_right`: that token is the text's next one, whose surprise is
    `surprise_nats`, `reference_surprise_nats`.
    """

    kl_nats: Tensor
    overlap: Tensor
    is_same_top: Tensor
    is_right: Tensor
    reference_is_right: Tensor
    surprise_nats: Tensor
    reference_surprise_nats: Tensor

    @staticmethod
    def between(reference: Tensor, strategy: Tensor, next_ids: Tensor) -> LawDistances:
        """Of log-probabilities `[N, V]`, and the tokens `[N]` that the text goes on with."""
        reference_probs, probs = reference.exp(), strategy.exp()
        # What the reference excludes adds nothing: 0 x log 0 is 0.
        terms = (reference - strategy).mul_(reference_probs).masked_fill_(reference_probs == 0, 0.0)
        top, reference_top = strategy.argmax(-1), reference.argmax(-1)
        column = next_ids.unsqueeze(-1)
        return LawDistances(
            kl_nats=terms.sum(-1).clamp_min(0.0),  # below 0 by rounding only
            overlap=torch.minimum(reference_probs, probs).sum(-1),
            is_same_top=top == reference_top,
            is_right=top == next_ids,
            reference_is_right=reference_top == next_ids,
            surprise_nats=-strategy.gather(-1, column).squeeze(-1),
            reference_surprise_nats=-reference.gather(-1, column).squeeze(-1),
        )

    @staticmethod
    def of_logits(reference: Tensor, strategies: Sequence[Tensor], next_ids: Tensor) -> list[LawDistances]:
        """The same of logits `[N, V]`, for several strategies; never more than a few positions in float64."""
        found: list[list[LawDistances]] = [[] for _ in strategies]
        for start in range(0, len(next_ids), ROWS):
            rows = slice(start, start + ROWS)
            laws = log_probs(reference[rows])
            for parts, strategy in zip(found, strategies, strict=True):
                parts.append(LawDistances.between(laws, log_probs(strategy[rows]), next_ids[rows]))
        return [LawDistances.joined(parts) for parts in found]

    @staticmethod
    def joined(parts: Sequence[LawDistances]) -> LawDistances:
        return LawDistances(
            *(torch.cat([getattr(part, name) for part in parts]) for name in LawDistances.__annotations__)
        )


@dataclass(frozen=True)
class Fidelity:
    """What the positions of some texts show together.

    `flips_n` counts the positions at which one of the two has the text's next token on top and the other has not (Dutta
    et al. 2024, arXiv 2407.09141): agreement that averages over gains and losses hides them. `kl_p99` is None below
    100 positions. `ppl_ratio` is strategy / reference.
    """

    num_positions: int
    kl_mean: float
    kl_median: float
    kl_p99: float | None
    kl_max: float
    top1_agreement_pct: float
    flips_n: int
    ppl_ratio: float
    expected_acceptance: float

    @staticmethod
    def of(distances: LawDistances) -> Fidelity:
        """Raises ValueError where there is no position."""
        kl, number = distances.kl_nats, len(distances.kl_nats)
        if not number:
            raise ValueError("no position to compare laws at")
        surprise = (distances.surprise_nats - distances.reference_surprise_nats).mean().item()
        return Fidelity(
            num_positions=number,
            kl_mean=kl.mean().item(),
            kl_median=kl.quantile(0.5).item(),
            kl_p99=kl.quantile(0.99).item() if number >= MIN_SAMPLES_P99 else None,
            kl_max=kl.max().item(),
            top1_agreement_pct=100 * distances.is_same_top.double().mean().item(),
            flips_n=int((distances.is_right != distances.reference_is_right).sum()),
            # Of a token that the strategy excludes the surprise is infinite.
            ppl_ratio=math.exp(surprise) if surprise < 700 else math.inf,
            expected_acceptance=distances.overlap.mean().item(),
        )

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """`quality/<prefix>...` by contract name; what is infinite is left out."""
        values = {
            "kl_mean": self.kl_mean,
            "kl_median": self.kl_median,
            "kl_p99": self.kl_p99,
            "kl_max": self.kl_max,
            "kl_n": self.num_positions,
            "top1_agreement_pct": self.top1_agreement_pct,
            "flips_n": self.flips_n,
            "ppl_ratio": self.ppl_ratio,
            "expected_acceptance": self.expected_acceptance,
        }
        return {
            f"quality/{prefix}{name}": value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
