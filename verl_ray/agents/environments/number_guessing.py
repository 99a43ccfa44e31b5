"""A number to guess in several turns: the environment says higher or lower.

Invariant: every turn uses up one guess, so an episode has at most `max_guesses` turns.
"""

from __future__ import annotations

import random

from verl_ray.agents.contract import Action, EpisodeTask, Observation, Step
from verl_ray.agents.environments.conversation import opening, user
from verl_ray.errors import InputError
from verl_ray.rewards.functions import final_number


class NumberGuessing:
    """An environment that thinks of a whole number.

    The guess of a turn is the last number of its text. A turn without a number, and a
    guess that is no whole number or out of the range, are answered by the rule that
    they break, and use up a guess like any other.
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 100,
        max_guesses: int = 10,
        reward_early: bool = True,
    ) -> None:
        """Take the rules.

        Args:
            low: Smallest number.
            high: Largest number.
            max_guesses: Number of guesses.
            reward_early: With m guesses, whether the right guess number k is worth
                (m - k + 1) / m, from 1 for the first to 1 / m for the last. Otherwise
                it is worth 1. An episode without the right guess is worth 0.

        Raises:
            InputError: There is no number or no guess.
        """
        place = "NumberGuessing"
        if low > high:
            raise InputError(f"low={low} is above high={high}", place=place)
        if max_guesses < 1:
            raise InputError(f"max_guesses={max_guesses}", "at least 1", place=place)

        self._low = low
        self._high = high
        self._max_guesses = max_guesses
        self._reward_early = reward_early
        self._secret = low
        self._num_guesses = 0

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Think of a number, which depends on the seed alone."""
        self._secret = random.Random(seed).randint(self._low, self._high)
        self._num_guesses = 0

        rules = (
            f"I think of a whole number from {self._low} to {self._high}. You have"
            f" {self._max_guesses} guesses. After each one I say whether my number is"
            " higher or lower. End your turn with your guess."
        )
        return Observation(opening(task.messages, rules))

    async def step(self, action: Action) -> Step:
        """Compare a guess with the number."""
        guess = final_number(action.text)
        self._num_guesses += 1

        if guess == self._secret:
            return Step(reward=self._reward_of_success(), done=True)
        remaining = self._max_guesses - self._num_guesses
        if remaining == 0:
            return Step(done=True)

        if guess is None:
            reply = "You said no number."
        elif guess % 1 != 0 or not self._low <= guess <= self._high:
            reply = f"Guess a whole number from {self._low} to {self._high}."
        elif guess < self._secret:
            reply = "My number is higher."
        else:
            reply = "My number is lower."
        return Step([user(f"{reply} Guesses that remain: {remaining}.")])

    def _reward_of_success(self) -> float:
        if not self._reward_early:
            return 1.0
        return (self._max_guesses - self._num_guesses + 1) / self._max_guesses

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""
