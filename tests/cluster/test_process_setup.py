"""The setup of a process: its variables, the name of its log, and its limits."""

import resource
import tempfile
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from verl_ray.cluster.context import RankSpec
from verl_ray.cluster.process_control import _log_name
from verl_ray.cluster.process_setup import allow_open_files, compiler_environment
from verl_ray.private_files import users_folder


def test_the_name_of_a_log_needs_no_quotes() -> None:
    first = RankSpec("engine trainer", 0, 1, "cpu", 2, True, "logs", 1)
    assert _log_name(first) == "engine_trainer-0.log"
    restarted = RankSpec("reward", 1, 2, "cpu", 2, True, "logs", 3)
    assert _log_name(restarted) == "reward-1.3.log"


def test_what_torch_compiles_is_stored_where_nobody_else_writes() -> None:
    ours = Path(compiler_environment({})["TORCHINDUCTOR_CACHE_DIR"])
    assert ours.parent == users_folder(Path(tempfile.gettempdir()))
    assert compiler_environment({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}) == {}


def test_torchs_own_choice_of_a_folder_is_nobodys_wish() -> None:
    # As in a process that has imported torch._dynamo.
    theirs = {"TORCHINDUCTOR_CACHE_DIR": default_cache_dir()}
    assert compiler_environment(theirs) == compiler_environment({})


def test_a_process_may_open_more_files_than_its_shell() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before[1] if before[1] != resource.RLIM_INFINITY else 65_536
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(most, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
