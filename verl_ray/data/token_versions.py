"""The age of tokens, in policy versions and in optimizer steps.

Invariant: every response token has the version that it was sampled from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rollouts
from verl_ray.errors import DataError


def versions_of_tokens(rows: Rollouts) -> Int64:
    """Return the version that each response token was sampled from, int64 [tokens].

    The tokens are those where `response_mask` is True, in their order.

    Raises:
        DataError: The engine recorded no version of a token, so its age is not known.
    """
    spans = rows.version_spans
    row_of_span = np.repeat(np.arange(rows.num_rows), np.diff(spans.offsets))
    starts = rows.offsets[:-1][row_of_span] + spans.values[:, 0]

    # Each row begins without a version. A version holds up to the next span of the row.
    first_spans = spans.offsets[:-1]
    starts = np.insert(starts, first_spans, rows.offsets[:-1])
    numbers = np.insert(spans.values[:, 1], first_spans, -1)
    ends = np.append(starts[1:], rows.num_tokens)
    versions: Int64 = np.repeat(numbers, ends - starts)[rows.response_mask]
    if versions.min(initial=0) < 0:
        number = np.count_nonzero(versions < 0)
        raise DataError(
            f"{number} of {len(versions)} response tokens have no policy version: the"
            " version spans of a row begin with its first response token"
        )
    return versions


@dataclass(frozen=True)
class VersionAges:
    """The versions that an update may learn from, and how old they are.

    Attributes:
        present: The version of the policy as the training step began.
        optimizer_steps: Age of each allowed version in optimizer steps, by version.
        bound: The most optimizer steps that a token may be old.
        stale_rows: Whether rows may have older tokens than of the present version.
    """

    present: int
    optimizer_steps: Mapping[int, int]
    bound: int
    stale_rows: bool

    def count(self, versions: Int64) -> dict[int, int]:
        """Return the number of tokens of each version.

        Args:
            versions: Version of each token, int64 [tokens].

        Raises:
            DataError: A token is too old, or of a version that is yet to come.
        """
        if not len(versions):
            return {}
        # Versions lie close together, so counting is cheaper than sorting.
        first = int(versions.min())
        counts = np.bincount(versions - first)
        offsets = np.flatnonzero(counts)
        by_version: dict[int, int] = dict(
            zip((first + offsets).tolist(), counts[offsets].tolist(), strict=True)
        )
        for version in by_version:
            age = self.optimizer_steps.get(version)
            if age is None or age > self.bound:
                allowed = ", ".join(map(str, sorted(self.optimizer_steps)))
                raise DataError(
                    f"an update would learn from tokens of policy version {version},"
                    f" which is {'not allowed' if age is None else f'{age} steps old'};"
                    f" allowed are the versions {allowed}, at most {self.bound}"
                    " optimizer steps old (rollout.staleness, algorithm.replay_age)"
                )
        return by_version

    def oldest(self, versions: Iterable[int]) -> int:
        """Return the largest age of these versions in optimizer steps; 0 for none."""
        return max((self.optimizer_steps[version] for version in versions), default=0)


class OptimizerSteps:
    """Counts the actor's optimizer steps, as of each version that may be learned from.

    Invariant: the versions that are kept are those that `rollout.staleness` allows.
    """

    def __init__(self, staleness: int, updates_per_step: int) -> None:
        """Begin at 0 optimizer steps, without a version.

        Args:
            staleness: Versions that a token may be old.
            updates_per_step: Optimizer steps of a training step, at most.
        """
        self._staleness = staleness
        self._updates_per_step = updates_per_step
        self._done = 0
        self._at_version: dict[int, int] = {}

    def publish(self, version: int) -> None:
        """Note that the policy is published under a version."""
        self._at_version[version] = self._done
        # The next training step allows no older ones.
        self._at_version = {
            known: steps
            for known, steps in self._at_version.items()
            if known >= version - self._staleness
        }

    def ages(self, update: int) -> VersionAges:
        """Return what update `update` of the present step, from 0, may learn from."""
        present = max(self._at_version)
        return VersionAges(
            present,
            {
                version: self._done + update - steps
                for version, steps in self._at_version.items()
            },
            self._staleness * self._updates_per_step + update,
            stale_rows=self._staleness > 0,
        )

    def add(self, steps: int) -> None:
        """Count the optimizer steps of a training step, once they are made."""
        self._done += steps

    def state(self) -> dict[str, object]:
        """Return the counts, as JSON."""
        versions = {str(known): steps for known, steps in self._at_version.items()}
        return {"done": self._done, "at_version": versions}

    def load_state(self, state: Mapping[str, Mapping[str, int] | int]) -> None:
        """Continue where `state` was taken."""
        done, at_version = state["done"], state["at_version"]
        assert isinstance(done, int)
        assert isinstance(at_version, Mapping)
        self._done = done
        self._at_version = {int(known): at for known, at in at_version.items()}
