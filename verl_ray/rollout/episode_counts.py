"""Events of episodes and their processes, as a replica tells its run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeCounts:
    """Events since they were last taken.

    Attributes:
        lost_processes: Processes that died or were stuck.
        run_again: Episodes that were begun again for it.
        retries: Episodes that were begun again after a fault of their own.
        lag_s: Longest delay of an event loop, in seconds.
        renewed_processes: Processes that were replaced for what they held.
        warnings: What a person should know of, each a sentence or two.
    """

    lost_processes: int = 0
    run_again: int = 0
    retries: int = 0
    lag_s: float = 0.0
    renewed_processes: int = 0
    warnings: tuple[str, ...] = ()

    def __add__(self, others: EpisodeCounts) -> EpisodeCounts:
        """Return the events of both together."""
        return EpisodeCounts(
            self.lost_processes + others.lost_processes,
            self.run_again + others.run_again,
            self.retries + others.retries,
            max(self.lag_s, others.lag_s),
            self.renewed_processes + others.renewed_processes,
            self.warnings + others.warnings,
        )

    def metrics(self) -> dict[str, float]:
        """Return them under the names that a run records."""
        return {
            "episode/lost_processes": float(self.lost_processes),
            "episode/run_again": float(self.run_again),
            "episode/retries": float(self.retries),
            "episode/loop_lag_s": self.lag_s,
            "episode/renewed_processes": float(self.renewed_processes),
        }
