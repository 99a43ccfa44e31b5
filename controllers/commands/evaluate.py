"""The command `evaluate`: a single evaluation on held-out data, without training.

Invariant: no weight changes, and neither a checkpoint nor a line of metrics.jsonl is
written. Deliberately not here: how a policy or a reward model is measured
(`controllers/trainers`).
"""

from __future__ import annotations

from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.session import open_session
from controllers.system.build import start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.base import Evaluation, read_data, task_of
from verl_ray.config.schema import Config


def evaluate(config: Config) -> int:
    """Measure model.path, or the checkpoint of run.resume, and print the result.

    A policy is measured on held-out problems, a reward model on held-out pairs.
    """
    metrics, samples = evaluation_of(config)

    for name, value in metrics.items():
        print(f"{name}: {value:.4f}")

    for sample in samples:
        print(
            f"{sample.prompt!r} -> {sample.response!r} (answer {sample.answer!r}, score"
            f" {sample.score:g})"
        )

    return 0


def evaluation_of(requested: Config) -> Evaluation:
    """Evaluate on a cluster and return the metrics and samples.

    Args:
        requested: the configuration as the user gave it, which may hold `auto`.
    """
    resumption = Resumption(requested)

    # Some tasks have nothing to measure before they are trained.
    if resumption.step is None:
        task_of(requested).refuse_untrained()

    # A mistake in the data is reported before any process starts.
    data = read_data(requested, trains=False)

    with open_session(requested) as session:
        # Only the roles that an evaluation needs are planned and started.
        shape = ClusterShape.of(session)
        config = resolve_on(requested, shape, checkpoint=resumption.path, learns=False)
        resumption.settle(config)
        task = task_of(config)

        with start(config, session, task.workers, learns=False) as system:
            trainer = task.make_trainer(data, system)
            state = Recovery(resumption).restore(trainer)
            trainer.begin(state)
            return trainer.evaluate()
