"""Small data sets in the exact columns of the originals: verl, TRL and well-known sets.

Each problem is a sum such as `1+1=`, so that a tiny model can read it. A tokenizer of
characters cannot read `hh_rlhf` and `orca_pairs`, which hold words.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from verl_ray.config.data import RecordKind
from verl_ray.data.fields import Fields

NUM_RECORDS = 12


@dataclass(frozen=True)
class Original:
    """A schema as other systems write it.

    Attributes:
        kinds: The kinds of records that it can be read as, the usual one first.
        suffix: The usual format of its files.
        record: Makes a record of a problem, its answer, a wrong answer and a number.
    """

    kinds: tuple[RecordKind, ...]
    suffix: str
    record: Callable[[str, str, str, int], Fields]


def user(text: str) -> Fields:
    return {"role": "user", "content": text}


def assistant(text: str) -> Fields:
    return {"role": "assistant", "content": text}


def _verl_rl(problem: str, answer: str, wrong: str, number: int) -> Fields:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"content": problem, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {
            "answer": f"{problem}{answer}",
            "index": number,
            "question": problem,
            "split": "train",
        },
    }


def _hh(problem: str, response: str) -> str:
    return f"\n\nHuman: {problem}\n\nAssistant: {response}"


SCHEMAS: dict[str, Original] = {
    "verl_rl": Original(("prompt", "supervised"), ".parquet", _verl_rl),
    "verl_sft": Original(
        ("supervised",),
        ".parquet",
        lambda p, a, w, n: {"extra_info": {"question": p, "answer": a}},
    ),
    "verl_sft_messages": Original(
        ("supervised", "prompt"),
        ".parquet",
        lambda p, a, w, n: {"messages": [user(p), assistant(a)]},
    ),
    "trl_prompt_only": Original(
        ("prompt",), ".jsonl", lambda p, a, w, n: {"prompt": p}
    ),
    "trl_prompt_only_messages": Original(
        ("prompt",), ".parquet", lambda p, a, w, n: {"prompt": [user(p)]}
    ),
    "trl_solution": Original(
        ("prompt", "supervised"),
        ".parquet",
        lambda p, a, w, n: {"prompt": [user(p)], "solution": a},
    ),
    "trl_prompt_completion": Original(
        ("supervised", "prompt"),
        ".jsonl",
        lambda p, a, w, n: {"prompt": p, "completion": a},
    ),
    "trl_prompt_completion_messages": Original(
        ("supervised", "prompt"),
        ".parquet",
        lambda p, a, w, n: {"prompt": [user(p)], "completion": [assistant(a)]},
    ),
    "trl_preference": Original(
        ("preference", "unpaired", "prompt"),
        ".jsonl",
        lambda p, a, w, n: {"prompt": p, "chosen": a, "rejected": w},
    ),
    "trl_preference_messages": Original(
        ("preference", "unpaired", "prompt"),
        ".parquet",
        lambda p, a, w, n: {
            "prompt": [user(p)],
            "chosen": [assistant(a)],
            "rejected": [assistant(w)],
        },
    ),
    "trl_implicit": Original(
        ("preference", "unpaired", "prompt"),
        ".parquet",
        lambda p, a, w, n: {"chosen": f"{p}{a}", "rejected": f"{p}{w}"},
    ),
    "trl_implicit_messages": Original(
        ("preference", "unpaired", "prompt"),
        ".jsonl",
        lambda p, a, w, n: {
            "chosen": [user(p), assistant(a)],
            "rejected": [user(p), assistant(w)],
        },
    ),
    # Every second response is a wrong answer.
    "trl_unpaired": Original(
        ("unpaired",),
        ".jsonl",
        lambda p, a, w, n: {
            "prompt": p,
            "completion": a if n % 2 else w,
            "label": n % 2 == 1,
        },
    ),
    "trl_unpaired_messages": Original(
        ("unpaired",),
        ".parquet",
        lambda p, a, w, n: {
            "prompt": [user(p)],
            "completion": [assistant(a if n % 2 else w)],
            "label": n % 2 == 1,
        },
    ),
    "ultrafeedback": Original(
        ("preference", "unpaired", "prompt", "supervised"),
        ".parquet",
        lambda p, a, w, n: {
            "prompt": p,
            "prompt_id": str(n),
            "chosen": [{"content": p, "role": "user"}, assistant(a)],
            "rejected": [{"content": p, "role": "user"}, assistant(w)],
            "messages": [{"content": p, "role": "user"}, assistant(a)],
            "score_chosen": 8.5,
            "score_rejected": 6.0,
        },
    ),
    "hh_rlhf": Original(
        ("preference", "unpaired", "prompt"),
        ".jsonl",
        lambda p, a, w, n: {"chosen": _hh(p, a), "rejected": _hh(p, w)},
    ),
    "orca_pairs": Original(
        ("preference", "unpaired", "prompt"),
        ".jsonl",
        lambda p, a, w, n: {
            "system": "Calculate.",
            "question": p,
            "chosen": a,
            "rejected": w,
        },
    ),
    "alpaca": Original(
        ("supervised", "prompt"),
        ".json",
        lambda p, a, w, n: {"instruction": p, "input": "", "output": a, "text": p + a},
    ),
    "gsm8k": Original(
        ("prompt", "supervised"),
        ".parquet",
        lambda p, a, w, n: {"question": p, "answer": a},
    ),
    "problem_solution": Original(
        ("prompt", "supervised"),
        ".csv",
        lambda p, a, w, n: {"problem": p, "solution": a, "level": n},
    ),
    "aime": Original(
        ("prompt", "supervised"),
        ".jsonl",
        lambda p, a, w, n: {"ID": f"2024-I-{n}", "Problem": p, "Answer": int(a)},
    ),
    "sharegpt": Original(
        ("supervised", "prompt"),
        ".json",
        lambda p, a, w, n: {
            "id": str(n),
            "conversations": [
                {"from": "human", "value": p},
                {"from": "gpt", "value": a},
            ],
        },
    ),
    "text": Original(("supervised",), ".jsonl", lambda p, a, w, n: {"text": f"{p}{a}"}),
}
"""Name of a schema -> what writes it."""


def write_schema(name: str, folder: Path, most: int = NUM_RECORDS) -> Path:
    """Write a data set of `most` sums in a schema, and return its file."""
    original = SCHEMAS[name]
    records = [
        original.record(f"{n}+1=", str(n + 1), str(n + 2), n)
        for n in range(1, most + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{original.suffix}"
    write_file(path, records)
    return path


def write_file(path: Path, records: Sequence[Fields]) -> None:
    """Write records in the format that the suffix of the path names."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(records)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(records), indent=1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
