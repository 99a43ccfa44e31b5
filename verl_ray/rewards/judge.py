"""Question to a judge and reading of its verdict: text to text, without a model.

Invariant: a verdict is a number within the judge's scale; any other reply is a typed
failure, never a number that was made up. Deliberately not here: the model that replies
(`workers/judge.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from verl_ray.config.reward import JudgeReward
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest

_SHOWN = 200  # characters of a reply without a verdict, from its end


class Judgement:
    """Question and verdict of a judge, by a template and a pattern.

    `verl_ray.config.rules` has verified both.
    """

    def __init__(self, config: JudgeReward) -> None:
        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
        self._template = environment.from_string(config.template)
        self._verdict = re.compile(config.verdict)
        self._lowest = config.lowest
        self._highest = config.highest

    def question(self, request: ScoreRequest) -> str | Score:
        """Return the question about a response, or the failure to make one.

        The template fails, for example, where it needs a field that `extra` lacks.
        """
        try:
            return self._template.render(**asdict(request))
        # Jinja has its own errors, and an expression may raise any other.
        except Exception as error:
            detail = f"the judge's template fails on this response: {error}"
            return Score(math.nan, ScoreHealth.EXCEPTION, detail)

    def verdict(self, reply: str, *, cut: bool) -> Score:
        """Return the last verdict in the judge's reply, as a score.

        Args:
            cut: Whether the reply was cut. A verdict at the end of such a reply is not
                read, since it may be the beginning of another: "1" of "10".
        """
        matches = list(self._verdict.finditer(reply))
        if not matches:
            return _unparsed(f"no verdict in the judge's reply: {_end_of(reply)}")

        last = matches[-1]
        if cut and last.end() == len(reply):
            return _unparsed(
                f"the judge's reply was cut in its verdict: {_end_of(reply)}"
            )
        try:
            value = float(last[1] or "")
        except ValueError:
            return _unparsed(f"the judge's verdict is no number: {last[0]!r}")
        if not self._lowest <= value <= self._highest:
            return _unparsed(
                f"the judge's verdict is {value:g}, outside of {self._lowest:g} to"
                f" {self._highest:g}"
            )
        return Score(value, ScoreHealth.OK)


def _unparsed(detail: str) -> Score:
    return Score(math.nan, ScoreHealth.UNPARSED, detail)


def _end_of(reply: str) -> str:
    return f"...{reply[-_SHOWN:]!r}"
