"""The log files of the processes."""

from verl_ray.cluster.context import RankSpec
from verl_ray.cluster.process_control import _log_name


def test_the_name_of_a_log_needs_no_quotes() -> None:
    first = RankSpec("engine trainer", 0, 1, "cpu", 2, True, "logs", 1)
    assert _log_name(first) == "engine_trainer-0.log"
    restarted = RankSpec("reward", 1, 2, "cpu", 2, True, "logs", 3)
    assert _log_name(restarted) == "reward-1.3.log"
