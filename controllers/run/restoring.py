"""The state of a trainer and of its ranks, from a checkpoint.

Invariant: what a rank cannot restore exactly is said.
"""

from __future__ import annotations

import sys

from controllers.trainers.base import Resumable
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.cluster.calls import wait_all
from workers.model_worker import ModelWorker


def load_checkpoint(checkpoint: Checkpoint, trainer: Resumable) -> None:
    """Load a checkpoint, and print its step.

    Args:
        checkpoint: The checkpoint.
        trainer: Trainer that gets the state.
    """
    loads = []
    for name, group in trainer.groups.items():
        loads.append(group.broadcast(ModelWorker.load, checkpoint.role(name)))

    # Every rank reports what it could not restore exactly.
    notes: list[str] = []
    for ranks in wait_all(loads):
        for notes_of_rank in ranks:
            notes.extend(notes_of_rank)

    if notes:
        others = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        print(
            f"warning: this run is not continued bit for bit: {notes[0]}{others}",
            file=sys.stderr,
            flush=True,
        )

    trainer.load_state(checkpoint.state["trainer"])
    trainer.load_files(checkpoint.path)
    print(f"continuing after step {checkpoint.step} from {checkpoint.path}", flush=True)


def load_model(checkpoint: Checkpoint, trainer: Resumable, role: str) -> None:
    """Load the model of a role to measure it, and print its step.

    The rest of the checkpoint belongs to the run that wrote it: random streams, data
    cursor, ledger, groups and what the trainer has adapted.

    Args:
        checkpoint: The checkpoint.
        trainer: Trainer with the processes of the role.
        role: The role that is measured.
    """
    group = trainer.groups[role]
    group.broadcast(ModelWorker.load, checkpoint.role(role)).result()
    print(f"measuring step {checkpoint.step} from {checkpoint.path}", flush=True)
