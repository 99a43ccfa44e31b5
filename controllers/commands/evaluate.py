"""The command `evaluate`: one evaluation on held-out data, without training.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is written. Deliberately not here:
how a policy or a reward model is measured (`controllers/trainers`).
"""

from __future__ import annotations

from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session
from controllers.system.build import Shape, resolve_on, start
from controllers.trainers.base import Evaluation, task_of
from verl_ray.config.schema import Config


def evaluate(config: Config) -> int:
    """Measure model.path, or the checkpoint that run.resume names: a policy on held-out problems, or a reward model on
    held-out pairs."""
    metrics, samples = evaluation_of(config)
    for name, value in metrics.items():
        print(f"{name}: {value:.4f}")
    for sample in samples:
        print(f"{sample.prompt!r} -> {sample.response!r} (answer {sample.answer!r}, score {sample.score:g})")
    return 0


def evaluation_of(given: Config) -> Evaluation:
    """What the command finds."""
    found = Resumption(given)
    if found.step is None:
        task_of(given).refuse_untrained()
    with open_session(given) as session:
        config = resolve_on(given, Shape.of(session), checkpoint=found.path, learns=False)
        found.settle(config)
        task = task_of(config)
        make_trainer = task.read(trains=False)
        with start(config, session, task.workers, learns=False) as system:
            trainer = make_trainer(system)
            trainer.begin(Recovery(found).restore(trainer))
            return trainer.evaluate()
