"""What a judge is asked, and what its verdict is: text to text, without a model.

Invariant: a verdict is a number within the judge's scale; anything else it says is a typed failure, never a number
that was made up. Deliberately not here: the model that answers (`workers/judge.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from verl_ray.config.reward import JudgeReward
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.process import ScoreRequest

_SHOWN = 200  # characters of an answer without a verdict, from its end


class Judgement:
    """The question and the reading of the answer, by a template and a pattern that `verl_ray.config.rules` let pass."""

    def __init__(self, config: JudgeReward) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
        self._template = environment.from_string(config.template)
        self._verdict = re.compile(config.verdict)
        self._lowest, self._highest = config.lowest, config.highest

    def question(self, request: ScoreRequest) -> str | Score:
        """What the judge is asked about a response; a failure if the template needs something that it lacks."""
        try:
            return self._template.render(**asdict(request))
        except Exception as error:  # whatever an expression in the template raises, by Jinja or by itself
            return Score(math.nan, Health.EXCEPTION, f"the judge's template fails on this response: {error}")

    def verdict(self, answer: str, *, cut: bool) -> Score:
        """The last verdict in the judge's answer. One that ends where an answer was `cut` may be the beginning of
        another: 1 of 10."""
        found = list(self._verdict.finditer(answer))
        if not found:
            return _unparsed(f"no verdict in the judge's answer: ...{answer[-_SHOWN:]!r}")
        if cut and found[-1].end() == len(answer):
            return _unparsed(f"the judge's answer was cut in its verdict: ...{answer[-_SHOWN:]!r}")
        try:
            value = float(found[-1][1] or "")
        except ValueError:
            return _unparsed(f"the judge's verdict is no number: {found[-1][0]!r}")
        if not self._lowest <= value <= self._highest:
            return _unparsed(f"the judge's verdict is {value:g}, outside of {self._lowest:g} to {self._highest:g}")
        return Score(value, Health.OK)


def _unparsed(detail: str) -> Score:
    return Score(math.nan, Health.UNPARSED, detail)
