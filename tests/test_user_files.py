"""What is shown of a failure in users' code."""

from __future__ import annotations

from verl_ray.user_files import last_cause, shortened

OWN = '  File "/home/a/agent.py", line 7, in run\n    ask()\n'
LIBRARY = (
    '  File "/usr/lib/python3.12/site-packages/openai/c.py", line 9, in f\n    f()\n'
)


def test_a_long_traceback_keeps_the_frame_of_the_users_own_code() -> None:
    head = "Traceback (most recent call last):\n"
    whole = f"{head}{LIBRARY}{OWN}{LIBRARY * 40}openai.APIError: no"
    assert shortened(whole, 10_000) == whole
    short = shortened(whole, 300)
    assert short == f"{head}{OWN}  ...\n{LIBRARY * 3}openai.APIError: no"
    # A line that is longer than all is cut, and marked as well.
    assert shortened(f"{head}E: {'x' * 500}", 300) == f"{head}  ...\n{'x' * 300}"
    for text in (whole, short):
        assert last_cause(text) == "openai.APIError: no (/home/a/agent.py, line 7)"
