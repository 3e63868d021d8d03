"""The objective of training: the next token, preferences among answers to a prompt, or the logits of a teacher."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class NextToken:
    """The mean loss over all tokens.

    ``answers`` are the sequences of an example of each objective, a prompt with an answer each; a ``reference`` is a
    frozen model whose log-probabilities it compares with; ``mismatched`` answers are those of other prompts.
    """

    kind: ClassVar[str] = "next-token"
    answers: ClassVar[int] = 0
    reference: ClassVar[str | None] = None
    mismatched: ClassVar[bool] = False


_BETA = "weight of the distance from the reference"
_REFERENCE = (
    "device = the reference's forward is a part of each step: of a second, frozen copy of the model, or with "
    "recipe.lora of its own weights with adapters off; precomputed = its log-probabilities are taken once before"
)
_WHERE = ("device", "precomputed")


@frozen(kw_only=True)
class DPO:
    """Direct preference optimization: -log sigmoid of beta times how much more the model than a frozen reference
    prefers the chosen answer (Rafailov et al. 2023, arXiv 2305.18290, equation 7). Sequences come in pairs."""

    kind: ClassVar[str] = "dpo"
    answers: ClassVar[int] = 2
    mismatched: ClassVar[bool] = False

    beta: float = setting(_BETA, 0.1, above=0)
    reference: str = setting(_REFERENCE, "device", choices=_WHERE)


@frozen(kw_only=True)
class ORPO:
    """Odds ratio preference optimization: the mean loss of the chosen answer's tokens, plus ``weight`` times -log
    sigmoid of the logarithm of the ratio of both answers' odds (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7).
    Sequences come in pairs; there is no reference."""

    kind: ClassVar[str] = "orpo"
    answers: ClassVar[int] = 2
    reference: ClassVar[str | None] = None
    mismatched: ClassVar[bool] = False

    weight: float = setting("weight of the odds ratio beside the loss of the chosen answer (lambda)", 0.1, above=0)


@frozen(kw_only=True)
class KTO:
    """Kahneman-Tversky optimization: each answer alone is desirable or not, by how much likelier it is than under a
    frozen reference, less the same of mismatched answers (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8)."""

    kind: ClassVar[str] = "kto"
    answers: ClassVar[int] = 1
    mismatched: ClassVar[bool] = True

    beta: float = setting(_BETA, 0.1, above=0)
    desirable: float = setting("weight of a desirable answer", 1.0, above=0)
    undesirable: float = setting("weight of an undesirable answer", 1.0, above=0)
    reference: str = setting(_REFERENCE, "device", choices=_WHERE)


@frozen(kw_only=True)
class Reward:
    """A reward model: -log sigmoid of by how much the chosen answer's score is above the rejected one's (Ouyang et al.
    2022, arXiv 2203.02155, equation 1). Sequences come in pairs; ``model.scores`` is in the place of the head."""

    kind: ClassVar[str] = "reward"
    answers: ClassVar[int] = 2
    reference: ClassVar[str | None] = None
    mismatched: ClassVar[bool] = False


@frozen(kw_only=True)
class Distillation:
    """Knowledge distillation: the forward KL divergence of each token's distribution from that of a frozen teacher,
    both softened by ``temperature`` T, times T^2 (Hinton et al. 2015, arXiv 1503.02531, section 2), beside the loss of
    the next token. The teacher is a model of its own, ``[teacher]``."""

    kind: ClassVar[str] = "distillation"
    answers: ClassVar[int] = 0
    reference: ClassVar[str] = "device"
    mismatched: ClassVar[bool] = False

    temperature: float = setting("by which the logits of both models are divided", 1.0, above=0)
    kd_ratio: float = setting(
        "weight of the divergence from the teacher; the rest is that of the loss of the next token, which 1 leaves out",
        1.0,
        above=0,
        at_most=1,
    )
    teacher_weights: str | None = setting(
        "directory of the teacher's weights: an import, a checkpoint or a run; absent = initialized by the seed", None
    )


Objective = NextToken | DPO | ORPO | KTO | Reward | Distillation
OBJECTIVES = {kind.kind: kind for kind in (NextToken, DPO, ORPO, KTO, Reward, Distillation)}
