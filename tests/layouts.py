"""Kinds of small runs that processes die or stop in, and whether two have the same bits.

Deliberately not here: what happens to them (`tests/faults.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tests.controllers.runs import Inputs
from tests.kills import Run, differences, steps_of
from tests.reward_models import make_reward_model

STEPS = 5

STALL_S = 90
"""Limit of a process without progress, which a start on a busy machine keeps, too."""

REWARD_MODEL = "reward_model"
"""Folder of the reward model, beside that of the policy."""


class GradedByModel(Inputs):
    """Inputs of runs that no function grades."""

    def rl(self, run_dir: Path) -> list[str]:
        return [
            change
            for change in super().rl(run_dir)
            if not change.startswith("reward.functions.")
        ]


@dataclass(frozen=True)
class Layout:
    """A kind of run, and the processes that it has.

    Attributes:
        root: Its root config.
        schedule: Its schedule.
        changes: Further overrides.
        processes: Its processes, by the names of their logs.
        roles: The roles that a checkpoint holds.
        steps: Number of its steps.
        stall_s: Its limit of a process without progress.
        grader: What grades instead of a function: a reward model, a judge or a service.
    """

    root: str
    schedule: str
    changes: tuple[str, ...]
    processes: tuple[str, ...]
    roles: tuple[str, ...]
    steps: int = STEPS
    stall_s: float = STALL_S
    grader: str | None = None

    def run(self, inputs: Inputs, folder: Path, *changes: str) -> Run:
        """Return a run of this layout.

        Args:
            inputs: Its model and data.
            folder: Its run.dir.
            changes: Further overrides.
        """
        changes = (f"run.stall_s={self.stall_s}", *self.changes, *changes)
        if self.grader is not None:
            if self.grader != "service":
                model = self._grading_model(inputs)
                changes = (*changes, f"reward.model.path={model}")
            inputs = GradedByModel(inputs.model, inputs.train, inputs.validation)
        return Run(inputs, folder, self.schedule, self.steps, changes, self.root)

    def _grading_model(self, inputs: Inputs) -> Path:
        """Return the folder of the model that grades; make it if it is not there."""
        if self.grader == "judge":
            return inputs.model
        folder = inputs.model.parent / REWARD_MODEL
        if not folder.exists():
            make_reward_model(folder, "qwen3", inputs.model.parent / "tokenizer")
        return folder


LAYOUTS = {
    "small": Layout(
        "grpo",
        "synchronous",
        ("placement=separate",),
        ("actor-0", "reward-0", "rollout-0"),
        ("actor",),
    ),
    "ppo": Layout(
        "ppo",
        "synchronous",
        # Other nodes have other numbers of cores.
        ("placement=separate", "run.threads_per_rank=1"),
        ("actor-0", "critic-0", "reference-0", "reward-0", "rollout-0"),
        ("actor", "critic"),
    ),
    "fsdp": Layout(
        "grpo",
        "one_step_off",
        ("backend=fsdp", "actor.num_ranks=2"),
        ("actor-0", "actor-1", "reward-0", "rollout-0"),
        ("actor",),
    ),
    # A reward model, and W&B.
    "model": Layout(
        "grpo",
        "synchronous",
        ("placement=separate", "reward=model", "tracking.wandb.mode=offline"),
        ("actor-0", "reward-0", "rollout-0", "wandb-core"),
        ("actor",),
        grader="reward model",
    ),
    "judge": Layout(
        "grpo",
        "synchronous",
        (
            "placement=separate", "reward=judge", "reward.max_failed_fraction=1", "reward.max_response_tokens=6", "reward.max_prompt_tokens=64",
            "reward.template='{{ prompt }}{{ response }}'", "reward.verdict='([0-9])'",
        ),
        ("actor-0", "reward-0", "rollout-0"),
        ("actor",),
        grader="judge",
    ),
}  # fmt: skip

SURROUNDED = {
    # Its service is up to whoever makes the run (`tests/surroundings.py`).
    "http": Layout(
        "grpo",
        "synchronous",
        (
            "placement=separate", "reward=http", "reward.request_timeout_s=10", "reward.deadline_s=40",
        ),
        ("actor-0", "reward-0", "rollout-0"),
        ("actor",),
        grader="service",
    ),
    # So is its small disk.
    "cramped": LAYOUTS["small"],
    "unsaved": replace(
        LAYOUTS["small"],
        changes=("placement=separate", "run.checkpoint_every=100", "run.recovery.snapshot_every=1"),
    ),
    # It lasts for longer than the clock is wrong.
    "long": replace(LAYOUTS["small"], steps=50),
}  # fmt: skip
"""Layouts of the drills of what a run stands on."""


def recorded(path: Path) -> list[dict[str, object]]:
    """Return the lines of a file, none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def differing(layout: Layout, whole: Run, broken: Run) -> list[str]:
    """Return where two runs differ: metrics, weights and states of the optimizer."""
    # The line before the first step is of an evaluation.
    assert steps_of(whole.lines()) == list(range(layout.steps + 1))
    if steps_of(broken.lines()) != list(range(layout.steps + 1)):
        return [f"steps {steps_of(broken.lines())}"]
    trained, expected = broken.trained(), whole.trained()
    # A judge understands only some of its own verdicts, so other prompts are not trained.
    assert whole.has_each_once() or layout.grader == "judge"
    if trained != expected:
        return [f"the ledger: {trained} are trained; expected {expected}"]
    found: list[str] = []
    for left, right in zip(whole.lines(), broken.lines(), strict=True):
        step = f"step {left['training/global_step']:.0f}"
        found += differences(left, right, step)
    for role in layout.roles:
        found += differences(whole.weights(role), broken.weights(role), role)
    return found
