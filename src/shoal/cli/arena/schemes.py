"""The verification schemes of `shoal arena`, each as its authors describe it.

    commit    what a prover makes of the states of its rows
    forge     what a liar sends who knows the scheme and has no states
    measure   what a verifier finds, as a table with one line per prompt: columns that are added up over prompts, and columns
              whose largest value counts
    score     one number for a submission of several prompts; larger is more suspicious

Where a paper leaves a choice or supposes another sampler, the docstring of the class says how it was read here.
R rows, T tokens, H hidden size, S submissions, P prompts of a submission.
"""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal import toploc
from shoal.wire.rollouts import Rollout
from shoal.wire.run_spec import ProofSpec

Floats = npt.NDArray[np.float64]


class CheckedRow(NamedTuple):
    """A row as it was sent, and what the verifier computed of it."""

    rollout: Rollout
    states_TH: Tensor
    """The verifier's states that predict the output tokens; all but the first have a commitment."""
    columns_6T: Floats
    """Log-prob, both ends of the interval, entropy, variance of -log p, uniform."""


class Table(NamedTuple):
    """What a scheme measured, one line per prompt."""

    sums_PA: Floats
    largest_PB: Floats


class Scheme:
    """One way to verify rows. A scheme that compares tokens and log-probs alone has nothing to commit to, so nothing to forge."""

    name: ClassVar[str]
    source: ClassVar[str]
    measured_as: ClassVar[str]
    """Schemes of the same value differ only in their limit and share what they measure."""
    bytes_per_token: ClassVar[float]
    has_limit: ClassVar[bool] = False
    """Whether the scheme has its own limit, at a score of 1. The others get a limit from honest scores."""

    def commit(self, states: Sequence[Tensor]) -> Sequence[object]:
        return [None] * len(states)

    def forge(self, states: Sequence[Tensor], typical_H: Tensor) -> Sequence[object] | None:
        return None

    def measure(
        self, rows: Sequence[CheckedRow], commitments: Sequence[object], prompts: Sequence[int]
    ) -> Table:
        """Returns the columns of `measure_rows`, added up for each prompt."""
        return by_prompt(self.measure_rows(rows, commitments), np.zeros((len(rows), 0)), prompts)

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        """Returns the columns that the scheme measures, one line per row."""
        raise NotImplementedError

    def score(self, sums_SA: Floats, largest_SB: Floats) -> Floats:
        """Returns the mean of a scheme whose two sums are a quantity and how often it was measured."""
        mean: Floats = sums_SA[:, 0] / np.maximum(sums_SA[:, 1], 1.0)
        return mean


class LargestScheme(Scheme):
    """A scheme whose score is its largest value, over the limit of the scheme itself."""

    has_limit = True

    def measure(
        self, rows: Sequence[CheckedRow], commitments: Sequence[object], prompts: Sequence[int]
    ) -> Table:
        return by_prompt(np.zeros((len(rows), 0)), self.measure_rows(rows, commitments), prompts)

    def score(self, sums_SA: Floats, largest_SB: Floats) -> Floats:
        scores: Floats = largest_SB[:, 0]
        return scores


def by_prompt(sums_RA: Floats, largest_RB: Floats, prompts: Sequence[int]) -> Table:
    """Returns the lines of each prompt's rows, in the order in which the prompts first occur."""
    numbers = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    places = np.array([numbers[prompt] for prompt in prompts])
    sums_PA = np.zeros((len(numbers), sums_RA.shape[1]))
    np.add.at(sums_PA, places, sums_RA)
    largest_PB = np.full((len(numbers), largest_RB.shape[1]), -np.inf)
    np.maximum.at(largest_PB, places, largest_RB)
    return Table(sums_PA, largest_PB)


class PublishedToploc(LargestScheme):
    """TOPLOC (Ong et al. 2025, arXiv 2501.16007): 258 bytes for 32 states. Refused if any segment has more than 38 of 128 exponents
    wrong, a mean mantissa error above 10 or a median above 8, the published limits for bfloat16."""

    name = "TOPLOC"
    measured_as = "toploc"
    source = "arXiv 2501.16007, published limits"
    proof: ClassVar[ProofSpec] = ProofSpec()
    bytes_per_token = (2 + 2 * proof.topk) / proof.segment_tokens

    def commit(self, states: Sequence[Tensor]) -> Sequence[object]:
        return toploc.build_proofs(states, topk=self.proof.topk, segment_tokens=self.proof.segment_tokens)

    def forge(self, states: Sequence[Tensor], typical_H: Tensor) -> Sequence[object]:
        """Returns constant polynomials of a likely value."""
        value = int(typical_H.abs().to(torch.bfloat16).max()[None].view(torch.int16).item()) & 0xFFFF
        words = np.zeros(self.proof.topk + 1, dtype=">u2")
        words[0], words[1] = 65497, value
        segments = [-(-len(row) // self.proof.segment_tokens) for row in states]
        return [words.tobytes() * number for number in segments]

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        checks = verify(rows, commitments, self.proof)
        worst = [
            max(
                (
                    max(one.exponent_mismatches / 38, one.mantissa_mean / 10, one.mantissa_median / 8)
                    for one in row
                ),
                default=0.0,
            )
            for row in checks
        ]
        return np.array(worst)[:, None]


def verify(
    rows: Sequence[CheckedRow], commitments: Sequence[object], proof: ProofSpec
) -> list[list[toploc.SegmentCheck]]:
    """Returns the checks of TOPLOC proofs against the verifier's states."""
    proofs = [bytes(one) for one in commitments if isinstance(one, bytes)]
    return toploc.verify_proofs(
        proofs,
        [row.states_TH[1:] for row in rows],
        topk=proof.topk,
        segment_tokens=proof.segment_tokens,
        control_seed=0x5A17,
    )


GRAIL_TOPK, GRAIL_BUCKETS, GRAIL_POSITIONS = 16, 8, 32
GRAIL_TOLERANCE, GRAIL_GROWTH = 6000.0, 5.0


class GrailSketch(LargestScheme):
    """GRAIL's sketch (one-covenant/grail, version 4 of the proof): for each token the indices of the 16 largest values of the last
    state, and the dot product of their signed logarithmic buckets with random coefficients from -127 to 127.

    A verifier looks at 32 positions of a row, compares the sketch with that of its own values at the sent indices, and refuses
    differences above 6000 + 5 sqrt(position). Positions and coefficients are drawn from the row's tokens here. Only the
    sketch: GRAIL's other checks (endings, log-probs, token statistics) are left out. Compact bytes are counted; the original
    sends JSON.
    """

    name = "GRAIL"
    measured_as = "grail"
    source = "one-covenant/grail, sketch with its own tolerance"
    bytes_per_token = 4.0 + 2.0 * GRAIL_TOPK

    def commit(self, states: Sequence[Tensor]) -> Sequence[object]:
        return [_sketch(row.float()) for row in states]

    def forge(self, states: Sequence[Tensor], typical_H: Tensor) -> Sequence[object]:
        """Returns the sketch of a typical state for every token: the coefficients are known before the rows are sent."""
        return [_sketch(typical_H.float().expand(len(row), -1)) for row in states]

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        worst = np.zeros((len(rows), 1))
        for place, (row, commitment) in enumerate(zip(rows, commitments, strict=True)):
            assert isinstance(commitment, tuple)
            indices_TK, sketch_T = commitment
            own_TH = row.states_TH[1:].to("cpu", torch.bfloat16).float()
            if not len(own_TH):
                continue
            rng = np.random.default_rng(list(row.rollout.output_tokens))
            chosen = torch.from_numpy(
                rng.permutation(len(own_TH))[: min(GRAIL_POSITIONS, len(own_TH))].copy()
            )
            values_CK = own_TH[chosen].gather(1, indices_TK[chosen])
            away_C = (_buckets(values_CK) @ _coefficients() - sketch_T[chosen]).abs()
            position_C = chosen.float() + len(row.rollout.prompt_tokens)
            worst[place] = float((away_C / (GRAIL_TOLERANCE + GRAIL_GROWTH * position_C.sqrt())).max())
        return worst


class TunedGrailSketch(GrailSketch):
    """Uses a limit from honest scores in the place of the sketch's own tolerance."""

    name = "GRAIL tuned"
    source = "one-covenant/grail, sketch with a tuned limit"
    has_limit = False


def _sketch(states_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the indices of the largest values of each state, [T, K], and the sketches, [T]."""
    states_TH = states_TH.cpu()
    indices_TK = states_TH.abs().topk(min(GRAIL_TOPK, states_TH.shape[1]), dim=1).indices
    return indices_TK, _buckets(states_TH.gather(1, indices_TK)) @ _coefficients()


def _buckets(values: Tensor) -> Tensor:
    """Returns signed buckets: the base-2 logarithm of |v| + 1, of which 10 fill all buckets."""
    size = torch.log2(values.abs() + 1.0).mul(GRAIL_BUCKETS / 10).floor().clamp(max=GRAIL_BUCKETS - 1)
    return torch.where(values >= 0, size, -size)


@cache
def _coefficients() -> Tensor:
    return torch.from_numpy(np.random.default_rng(7).integers(-127, 128, size=GRAIL_TOPK).astype(np.float32))


MARGIN_CAP = 0.5


class TokenDifr(Scheme):
    """Token-DiFR (Karvonen et al. 2025, arXiv 2511.20621): the mean margin by which the reference, with the same randomness, prefers
    another token; each token's margin is capped at 0.5, as in the authors' code. It needs no commitment.

    The authors suppose Gumbel-max sampling and measure the margin in logits after the noise. Here tokens are drawn by inverse
    CDF, so the margin is the difference of log-odds between the uniform and the nearest end of the token's interval.
    """

    name = "Token-DiFR"
    measured_as = "token-difr"
    source = "arXiv 2511.20621, margin in log-odds"
    bytes_per_token = 0.0

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        return np.array([[margins(row.columns_6T).sum(), row.columns_6T.shape[1]] for row in rows])


def margins(columns_6T: Floats) -> Floats:
    """Returns how far, in log-odds, each token's uniform is outside of its interval; 0 inside, at most MARGIN_CAP."""
    low_T, high_T, uniform_T = columns_6T[1], columns_6T[2], columns_6T[5]
    end_T = np.where(uniform_T < low_T, low_T, np.where(uniform_T > high_T, high_T, uniform_T))
    return np.minimum(np.abs(_log_odds(end_T) - _log_odds(uniform_T)), MARGIN_CAP)


def _log_odds(share: Floats) -> Floats:
    clipped = np.clip(share, 1e-12, 1 - 1e-12)
    odds: Floats = np.log(clipped) - np.log1p(-clipped)
    return odds


DIFR_SIZE = 4


class ActivationDifr(Scheme):
    """Activation-DiFR (same paper): each last state projected to 4 values by a random orthogonal matrix that both sides know; the
    score is the mean Euclidean distance to the verifier's projection. 4 values in bfloat16 take the space of a TOPLOC proof."""

    name = "Act-DiFR"
    measured_as = "activation-difr"
    source = "arXiv 2511.20621, 4 values per token"
    bytes_per_token = 2.0 * DIFR_SIZE

    def commit(self, states: Sequence[Tensor]) -> Sequence[object]:
        return [(row.float().cpu() @ _projection(row.shape[1])).to(torch.bfloat16) for row in states]

    def forge(self, states: Sequence[Tensor], typical_H: Tensor) -> Sequence[object]:
        """Returns the projection of a typical state for every token."""
        return self.commit([typical_H.expand(len(row), -1) for row in states])

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        sums = np.zeros((len(rows), 2))
        for place, (row, sent) in enumerate(zip(rows, commitments, strict=True)):
            assert isinstance(sent, Tensor)
            own_TH = row.states_TH[1:].to("cpu", torch.bfloat16).float()
            away_T = (own_TH @ _projection(own_TH.shape[1]) - sent.float()).norm(dim=1)
            sums[place] = float(away_T.sum()), len(away_T)
        return sums


@cache
def _projection(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    columns_HK: Tensor = torch.linalg.qr(torch.randn(size, DIFR_SIZE, generator=generator)).Q
    return columns_HK


BINS = np.concatenate([[-np.inf], np.linspace(-12.0, 0.0, 128)])


class Logic(Scheme):
    """LOGIC (context-labs/logic): the sent log-probs and the verifier's, as two samples of a Kolmogorov-Smirnov test. The score is its
    statistic times the root of the number of tokens.

    The original asks for the likeliest 20 tokens at some positions. Here it has the drawn token's log-prob at all positions,
    which is what a rollout carries. The distributions are compared at 128 places.
    """

    name = "LOGIC"
    measured_as = "logic"
    source = "context-labs/logic, Kolmogorov-Smirnov test"
    bytes_per_token = 4.0

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        sums = [
            np.histogram(np.clip(row.rollout.logprobs, -1e9, 0.0), BINS)[0]
            - np.histogram(np.clip(row.columns_6T[0], -1e9, 0.0), BINS)[0]
            for row in rows
        ]
        counts = [[len(row.rollout.logprobs)] for row in rows]
        return np.concatenate([counts, sums], axis=1).astype(np.float64)

    def score(self, sums_SA: Floats, largest_SB: Floats) -> Floats:
        count_S = np.maximum(sums_SA[:, 0], 1.0)
        scores: Floats = np.abs(sums_SA[:, 1:].cumsum(axis=1)).max(axis=1) / np.sqrt(count_S)
        return scores


class LogprobGap(Scheme):
    """The mean |sent - recomputed| log-prob, token by token: the strongest test that log-probs alone allow."""

    name = "log-probs"
    measured_as = "logprobs"
    source = "mean difference of log-probs"
    bytes_per_token = 4.0

    def measure_rows(self, rows: Sequence[CheckedRow], commitments: Sequence[object]) -> Floats:
        return np.array(
            [
                [np.abs(np.asarray(row.rollout.logprobs) - row.columns_6T[0]).sum(), row.columns_6T.shape[1]]
                for row in rows
            ]
        )
