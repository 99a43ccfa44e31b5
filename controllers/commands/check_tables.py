"""The tables of the command `check`: the sizes of a step, and the roles.

Invariant: a table shows only values of the configuration.
"""

from __future__ import annotations

from rich.table import Table

from verl_ray.config.algebra import RoleBatch, batch_algebra
from verl_ray.config.schema import Config

# Stands for a number that a role does not have.
_NONE = "-"

# Narrow enough for long names of roles on a terminal with 80 columns.
_BATCH_COLUMNS = (
    "role",
    "ranks",
    "rows\nper\nrank",
    "mini-\nbatch",
    "per\nrank",
    "updates\nper step",
    "micro-\nbatch\ntokens",
)
_ROLE_COLUMNS = (
    "role",
    "backend",
    "dtype",
    "ranks",
    "placement",
)


def batch_table(config: Config) -> Table:
    """Return the sizes of one step, a row per role."""
    sizes = batch_algebra(config)
    title = (
        f"one step: {config.step_in_words}, each of up to {sizes.max_row_tokens} tokens"
    )
    table = Table(title=title, title_justify="left")

    role_column, *number_columns = _BATCH_COLUMNS
    table.add_column(role_column, justify="left", no_wrap=True)
    for heading in number_columns:
        table.add_column(heading, justify="right", no_wrap=True)

    for role in sizes.roles:
        table.add_row(*_batch_cells(role))

    return table


def _batch_cells(role: RoleBatch) -> list[str]:
    mini_batch = _NONE
    if role.mini_batch_size is not None:
        mini_batch = str(role.mini_batch_size)

    per_rank = _NONE
    if role.mini_batch_size_per_rank is not None:
        per_rank = str(role.mini_batch_size_per_rank)

    # A role that does not learn makes no updates.
    updates = str(role.updates_per_step or _NONE)

    return [
        role.role,
        str(role.ranks),
        str(role.rows_per_rank),
        mini_batch,
        per_rank,
        updates,
        f"<= {role.micro_batch_tokens_per_rank}",
    ]


def role_table(config: Config) -> Table:
    """Return the roles of a run: models on backends, graders of texts, and engines."""
    table = Table(title="roles", title_justify="left")
    # The first column has names, which are not cut.
    for number, heading in enumerate(_ROLE_COLUMNS):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)

    # A single role shares no process.
    has_others = len(config.model_roles) + len(config.engines) > 1
    placement = "separate"
    if has_others and config.shares_processes:
        placement = "colocated"

    for name, role in config.model_roles.items():
        table.add_row(
            name,
            role.backend.description(role.num_ranks),
            role.backend.dtype,
            str(role.num_ranks),
            placement,
        )

    for name, grader in config.graders.items():
        # Other graders are models or engines, which have rows as such.
        if grader.cpu_ranks is not None:
            table.add_row(
                name,
                grader.kind,
                _NONE,
                str(grader.cpu_ranks),
                "CPU only",
            )

    for name, engine in config.engines.items():
        settings = engine.config
        is_judge = name in config.judges
        table.add_row(
            name,
            "vllm",
            settings.dtype,
            f"{settings.num_replicas} x {settings.tensor_parallel}",
            "separate" if is_judge else placement,
        )

    return table


def source_lines(config: Config) -> str:
    """Return the model, functions or service of each role, a line for each of them.

    They stand in no table, since paths are long.
    """
    sources = {name: role.model.folder for name, role in config.model_roles.items()}
    for name, grader in config.graders.items():
        if grader.cpu_ranks is not None:
            sources[name] = grader.source_in_words
    sources |= {name: engine.path for name, engine in config.engines.items()}

    roles_of: dict[str, list[str]] = {}
    for name, source in sources.items():
        roles_of.setdefault(source, []).append(name)

    lines = [f"  {', '.join(names)}: {source}" for source, names in roles_of.items()]
    return "\n".join(["models, functions and services", *lines])
