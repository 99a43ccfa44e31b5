"""Mistakes of a first day, each with the words that its message has to hold.

`tests/test_mistakes.py` makes every one of them. As a program this file prints a table of
what each costs, in seconds of CPU time and in lines; with --verbose also the messages::

    python -m tests.mistakes [--verbose]

Deliberately not here: mistakes that no file could have told (`tests/controllers/trainers`).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs, make_inputs
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.files import write_records
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.models.tiny import make_tiny_qwen3

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 8
_ARGUMENTS = "response, answer, *, prompt, data_source, extra"


@dataclass(frozen=True)
class Mistake:
    """What a user types, and what the message about it has to say.

    Attributes:
        name: The mistake in a few words.
        arguments: Arguments of `verl-ray`.
        fix: Words that only a message with the right fix has.
    """

    name: str
    arguments: tuple[str, ...]
    fix: str


@dataclass(frozen=True)
class Answer:
    """What the command said about a mistake.

    Attributes:
        code: Exit code of the command.
        cpu_s: Seconds of CPU time, those of its child processes included; zero if nobody
            counted.
        text: Everything that it printed.
    """

    code: int
    cpu_s: float
    text: str

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def faults(self, mistake: Mistake) -> list[str]:
        """Return what is wrong with the answer."""
        faults = []
        if self.code != 2:
            faults.append(f"exit code {self.code}")
        if self.num_lines > MOST_LINES:
            faults.append(f"{self.num_lines} lines")
        if "Traceback" in self.text:
            faults.append("a traceback")
        # A message is wrapped where the terminal ends.
        if mistake.fix not in " ".join(self.text.split()):
            faults.append(f"does not say {mistake.fix!r}")
        return faults


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of commands whose home is this folder."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for name in ("WANDB_API_KEY", "RAY_ADDRESS"):
        variables.pop(name, None)
    variables["HOME"] = str(folder)
    # Nobody answers there.
    variables["HF_ENDPOINT"] = "http://127.0.0.1:9"
    variables["PYTHONPATH"] = str(ROOT)
    return variables


def make(mistake: Mistake, folder: Path) -> Answer:
    """Run the command of a mistake in a process of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-m", "controllers", *mistake.arguments],
        cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Answer(ended.returncode, cpu_s, ended.stdout + ended.stderr)


def mistakes(folder: Path) -> list[Mistake]:
    """Write the files of all mistakes to a folder, and return the mistakes."""
    inputs = make_inputs(folder)
    return [
        *_of_keys_and_values(inputs),
        *_of_other_systems(inputs),
        *_of_data(inputs, folder),
        *_of_rewards(inputs, folder),
        *_of_models(inputs, folder),
        *_of_model_files(inputs, folder),
        *_of_graders(inputs, folder),
        *_of_files_and_commands(inputs, folder),
    ]


def _check(inputs: Inputs, *overrides: str) -> tuple[str, ...]:
    """Return the command that checks a GRPO run with the overrides."""
    own = [
        f"model.path={inputs.model}",
        f"data.train_path={inputs.train}",
        f"data.validation_path={inputs.validation}",
        "data.max_prompt_tokens=8",
        "rollout.max_response_tokens=6",
        "rollout.kv_cache_gib=0.03125",
    ]
    return ("check", "--config-name", "grpo", *own, *overrides)


def _of_keys_and_values(inputs: Inputs) -> list[Mistake]:
    table = [
        ("misspelt key", "rollout.temperatur=0.7", "rollout.temperature"),
        ("misspelt choice", "algorithm=gpro", "grpo"),
        ("text for a number", "run.total_steps=many", "run.total_steps"),
        (
            "null for a number",
            "rollout.staleness=null",
            "Use a whole number of at least 0",
        ),
        ("negative number", "actor.optimizer.lr=-1", "actor.optimizer.lr"),
        ("override without value", "run.name", "Write run.name=VALUE"),
        ("flag in place of override", "--run.total_steps=3", "run.total_steps=3"),
        ("batch not divisible", "actor.mini_batch_size=100", "actor.mini_batch_size"),
        ("critic for GRPO", "critic.optimizer.lr=1e-5", "critic"),
        ("W&B online without a login", "tracking.wandb.mode=online", "wandb login"),
        (
            "longer than the positions of the model",
            "data.max_prompt_tokens=4095",
            "_tokens by 5, or take another model",
        ),
        ("best by an unknown metric", "run.best_metric=accuracy", "run.best_metric"),
        ("steps and epochs", "run.total_epochs=0", "run.total_epochs"),
        ("colocated with tensor parallel", "rollout.tensor_parallel=3", "rollout."),
        ("a root config without its option", "grpo", "--config-name grpo"),
        ("a text with brackets", "run.dir=/a (b)", "run.dir='/a (b)'"),
        (
            "a limit that both files exceed",
            "data.max_prompt_tokens=1",
            "or set data.overlong=skip",
        ),
        (
            "a section of another task",
            "sft.max_tokens=9",
            "the task rl has no section sft",
        ),
        ("an engine that does not exist", "backend=deepspeed", "fsdp"),
        ("a GPU without its memory", "--machine=gpus=8,gpu=H100", "mean H100-80G?"),
        (
            "the schedule of a learning rate",
            "schedule=cosine",
            "actor.optimizer.schedule=cosine",
        ),
        ("overlap in one placement", "schedule=one_step_off", "Use placement=separate"),
        (
            "a chat template that is not there",
            "data.chat_template=chatlm",
            "Set it to chatml, plain or the path of a file",
        ),
        ("a chat template of other tokens", "data.chat_template=chatml", "Use plain"),
        (
            "a day that nothing writes",
            "data.template_day=2026-01-31",
            "which could write the day",
        ),
        ("older tokens alone", "rollout.staleness=1", "choose schedule=carry_over"),
        ("a key of before", "rollout.in_flight=8", "is now rollout.concurrency"),
        (
            "a divergence that charges nothing",
            "algorithm.kl.coefficient=0",
            "algorithm.kl=none",
        ),
    ]
    return [
        Mistake(name, _check(inputs, override), fix) for name, override, fix in table
    ]


def _of_other_systems(inputs: Inputs) -> list[Mistake]:
    table = [
        ("data.train_batch_size=256", "data.prompts_per_step"),
        ("actor_rollout_ref.rollout.n=8", "rollout.group_size"),
        ("rollout.n=8", "rollout.group_size"),
        ("algorithm.adv_estimator=grpo", "algorithm=grpo"),
        ("num_generations=8", "rollout.group_size"),
        ("beta=0.04", "algorithm.kl"),
        ("beta=0", "0 is algorithm.kl=none"),
        ("scale_rewards=false", "algorithm.advantage=dr_grpo"),
        ("loss_type=cispo", "algorithm=NAME chooses the loss"),
        ("learning_rate=1e-6", "actor.optimizer.lr"),
        ("per_device_train_batch_size=4", "data.prompts_per_step"),
        ("trainer.save_freq=10", "run.checkpoint_every"),
        ("eval_strategy=no", "run.evaluate_every, in steps; 0 = never"),
        ("backend.device=cuda", "the device is found by itself"),
        ("actor.use_kl_loss=true", "algorithm.kl"),
        ("rollout.gpu_memory_utilization=0.6", "rollout.kv_cache_gib"),
        ("run.epochs=2", "run.total_epochs"),
        ("trainer.total_epochs=2", "Here it is run.total_epochs"),
        ("checkpointing.enabled=true", "run.checkpoint_every"),
        ("policy.dtensor_cfg.enabled=true", "backend=fsdp"),
        ("algorithm.filter_groups.enable=true", "algorithm.dynamic_sampling=10"),
        ("overlong_buffer.enable=true", "algorithm.overlong_share"),
        ("critic_learning_rate=1e-5", "With a critic (algorithm=ppo)"),
        ("weight_decay=0.1", "Here it is actor.optimizer.weight_decay"),
        ("do_sample=false", "evaluation.temperature=0"),
        ("reward.function=own.py:f", "reward.functions.default"),
        ("attn_implementation=sdpa", "Nothing to set"),
        ("max_off_policy_steps=8", "rollout.staleness is the bound"),
        ("partial_rollout=true", "schedule=carry_over"),
        ("agent.environment=own.py:Game", "Did you mean agent.environments?"),
    ]
    return [
        Mistake(f"{override.split('=')[0]} of another system", _check(inputs, override), fix)
        for override, fix in table
    ]  # fmt: skip


def _of_data(inputs: Inputs, folder: Path) -> list[Mistake]:
    good = json.dumps({"prompt": "1+1=", "answer": "2"})
    null = json.dumps({"prompt": "1+1=", "answer": None})
    lone = '{"prompt": "1+\\ud800=", "answer": "2"}'
    chat = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
    texts = [
        ("an empty file", "empty.jsonl", "", "holds no records"),
        ("bad JSON", "bad.jsonl", f'{good}\n{{"prompt": \n', "line 2: not JSON"),
        ("no answer", "missing.jsonl", f'{good}\n{{"prompt": "1+1="}}\n', "line 2: no field 'answer'"),
        ("answer: null", "null.jsonl", f"{good}\n{null}\n", "line 2: answer is null"),
        ("a lone surrogate", "lone.jsonl", f"{good}\n{lone}\n", "line 2"),
        ("text named parquet", "fake.parquet", "hello", "cannot be read as Parquet"),
        ("prompts that are all too long", "long.jsonl",
         json.dumps({"prompt": "1+" * 20, "answer": "2"}) + "\n", "data.max_prompt_tokens="),
        ("chat without a template", "chat.jsonl", f"{chat}\n", "line 1: found chat messages"),
        ("a special token spelled out", "special.jsonl",
         json.dumps({"prompt": "1+<eos>=", "answer": "2"}) + "\n", "data.special_tokens"),
        ("nesting without an end", "deep.jsonl", '{"prompt": ' + "[" * 9_999, "nested too deeply"),
        ("columns of no schema", "columns.jsonl", json.dumps({"sum": "1+1=", "result": "2"}) + "\n",
         "Set 'data.columns={prompt: COLUMN, answer: COLUMN}'"),
        ("a misspelt column", "misspelt.jsonl", json.dumps({"promt": "1+1=", "answer": "2"}) + "\n",
         "Set 'data.columns={prompt: promt, answer: answer}'"),
        ("preferences without a common prompt", "pairs.jsonl",
         json.dumps({"chosen": "2", "rejected": "3"}) + "\n", "Set 'data.columns={prompt: COLUMN}'"),
        ("images", "images.jsonl", json.dumps({"prompt": "1+1=", "answer": "2", "images": ["a.png"]}) + "\n",
         "images, videos and sounds are not supported yet"),
        ("sounds", "sounds.jsonl", json.dumps({"prompt": "1+1=", "answer": "2", "audios": ["a.wav"]}) + "\n",
         "images, videos and sounds are not supported yet"),
        ("a list in place of lines", "list.jsonl", f"[{good}]\n", "line 1: found list"),
        ("a .json that is cut", "cut.json", f"[{good}", "at the end of the file"),
        ("a .csv without a header", "bare.csv", "1+1=,2\n", "Expected the names of the columns in the first line"),
        ("a .csv without quotes", "comma.csv", "prompt,answer\n1,000+1=,2\n", "put quotes around values"),
        ("messages as NumPy prints them", "printed.csv",
         "prompt,answer\n\"[{'role': 'user', 'content': '1+'} {'role': 'user', 'content': '1='}]\",2\n",
         "Write them as a list, or with json.dumps"),
        ("a character without a token", "letters.jsonl",
         json.dumps({"prompt": "one", "answer": "2"}) + "\n", "line 1"),
    ]  # fmt: skip
    listed = []
    for name, file, text, fix in texts:
        path = folder / file
        path.write_text(text)
        more = ["data.apply_chat_template=false"] * (file == "chat.jsonl")
        listed.append(
            Mistake(name, _check(inputs, f"data.train_path={path}", *more), fix)
        )

    parquet = write_records(
        [{"prompt": "1+1=" * 9, "answer": "2"}] * 9, folder, "torn"
    ).parquet
    content = bytearray(parquet.read_bytes())
    content[4:60] = b"\xff" * 56
    parquet.write_bytes(content)
    mixed = folder / "mixed"
    write_records([{"prompt": "1+1=", "answer": "2"}], mixed, "sums")
    for name, path, fix in (
        ("damaged pages", parquet, "Write the file again"),
        ("a folder with its held-out part", folder, "the files of one of them: "),
        ("a folder of several formats", mixed, "Take one of its files"),
        ("a glob without files", folder / "*.csv.gz", "the glob matches no file"),
    ):
        listed.append(Mistake(name, _check(inputs, f"data.train_path={path}"), fix))

    wrong = [
        ("a column that is not there", "{answer: truth}", "no column 'truth'"),
        ("an unknown field of data.columns", "{promt: answer}", "Did you mean prompt?"),
        (
            "a field of another task",
            "{response: answer}",
            "data.columns={answer: answer}",
        ),
    ]
    for name, columns, fix in wrong:
        overrides = (
            f"data.columns={columns}",
            "data.validation_path=null",
            "run.evaluate_every=0",
        )
        listed.append(Mistake(name, _check(inputs, *overrides), fix))

    near = inputs.train.with_name("tran.jsonl")
    listed.append(
        Mistake("a misspelt path", _check(inputs, f"data.train_path={near}"), str(inputs.train.name))
    )  # fmt: skip
    return listed


def _of_rewards(inputs: Inputs, folder: Path) -> list[Mistake]:
    table = [
        ("a reward that cannot be imported", f"import nowhere_at_all\ndef f({_ARGUMENTS}): return 1.0", "No module named 'nowhere_at_all'"),
        ("a reward with a syntax error", "def f(:", "own"),
        ("a reward with an unknown parameter", "def f(response, answr): return 1.0", "Did you mean answer?"),
        ("a class that is built with arguments", "class f:\n def __init__(self, model): ...\n def __call__(self, response): ...",
         "is built with model"),
        ("a column that the record lacks", "def f(completions, level): return [1.0]", "no column 'level'"),
        ("a batched reward with too few scores", "def f(completions, **columns): return [1.0]", "returned 1 scores for 2"),
        ("a reward that returns text", f"def f({_ARGUMENTS}): return 'good'", "returned str 'good'"),
        ("a dict without a score", f"def f({_ARGUMENTS}): return {{'reward': 1}}", "expected 'score' in it"),
        ("a reward that returns NaN", f"def f({_ARGUMENTS}): return float('nan')", "returned nan"),
        ("a reward that ends its process", f"import os\ndef f({_ARGUMENTS}): os._exit(3)", "exited with status 3"),
        ("a reward that raises", f"def f({_ARGUMENTS}): return 1 / len(response)", "ZeroDivisionError"),
        ("a reward without an end", f"import time\ndef f({_ARGUMENTS}): time.sleep(60)", "reward.deadline_s"),
        ("a function that is not in the file", "def g(response): return 1.0", "f"),
    ]  # fmt: skip
    listed = []
    for index, (name, body, fix) in enumerate(table):
        path = folder / f"own{index}.py"
        path.write_text(body + "\n")
        arguments = _check(
            inputs, f"reward.functions.default={path}:f", "reward.deadline_s=1"
        )
        listed.append(Mistake(name, arguments, fix))

    for name, spec in (
        ("a reward without its function", "own7.py"),
        ("a reward without .py", "own7:f"),
    ):
        arguments = _check(inputs, f"reward.functions.default={folder}/{spec}")
        listed.append(Mistake(name, arguments, "own7.py:f?"))

    for name, spec, fix in (
        ("a reward file that is missing", f"{folder}/absent.py:f", "absent.py"),
        (
            "a reward module that is not there",
            "absent.maths:f",
            "no module 'absent.maths'",
        ),
    ):
        arguments = _check(inputs, f"reward.functions.default={spec}")
        listed.append(Mistake(name, arguments, fix))

    for name, table, fix in (
        (
            "a form without a closing bracket",
            'format, pattern: "("',
            "regular expression",
        ),
        ("an argument with a wrong letter", "format, tag: [think]", "mean tags?"),
        ("a kind of ROUGE that is none", "rouge, kind: rougeX", "rougeLsum"),
        ("a schema that is not there", "json_schema, schema_path: no.json", "no.json"),
        (
            "a schema with a reference to nothing",
            'json_schema, schema: {items: {$ref: "#/item"}}',
            "reference '#/item'",
        ),
    ):
        setting = f"reward.functions.default={{function: {table}}}"
        listed.append(Mistake(name, _check(inputs, setting), fix))
    return listed


def _of_models(inputs: Inputs, folder: Path) -> list[Mistake]:
    tokenizer = folder / "tokenizer16"
    character_tokenizer(tokenizer, ALPHABET)
    shape = TinyModelConfig(
        hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=96,
        tie_embeddings=True,
    )  # fmt: skip
    small_heads = make_tiny_qwen3(folder / "heads16", tokenizer, shape, seed=0)

    cut = folder / "cut"
    cut.mkdir()
    for file in inputs.model.iterdir():
        content = file.read_bytes()
        short = content[: len(content) // 2]
        cut.joinpath(file.name).write_bytes(
            short if file.suffix == ".safetensors" else content
        )

    return [
        Mistake(
            "a model that only the hub has",
            _check(inputs, "model.path=Qwen/Qwen3-0.6B"),
            "Run `hf download Qwen/Qwen3-0.6B` where there is a network",
        ),
        Mistake(
            "a data set that only the hub has",
            _check(inputs, "data.train_path=openai/gsm8k"),
            "Run `hf download openai/gsm8k --repo-type dataset` where",
        ),
        Mistake(
            "a variable that is not set",
            _check(inputs, "model.path=$NOWHERE/m"),
            "export NOWHERE=",
        ),
        Mistake(
            "a variable in braces",
            _check(inputs, "model.path=${HOME}/m"),
            "$HOME in a path",
        ),
        Mistake(
            "a revision of a folder",
            _check(inputs, "model.revision=main"),
            "model.path is a folder",
        ),
        Mistake("head size 16", _check(inputs, f"model.path={small_heads}"), "head"),
        Mistake(
            "a file of weights cut short",
            _check(inputs, f"model.path={cut}"),
            "its header describes",
        ),
        Mistake(
            "a misspelt model",
            _check(inputs, f"model.path={inputs.model.with_name('modle')}"),
            "model",
        ),
        Mistake(
            "a KV cache smaller than a row",
            _check(inputs, "rollout.kv_cache_gib=0.000001"),
            "rollout.kv_cache_gib",
        ),
    ]


def _copy(inputs: Inputs, folder: Path, file: str, change: object) -> Path:
    """Copy the model with other settings in a JSON file, or another text in a file."""
    shutil.copytree(inputs.model, folder)
    path = folder / file
    if isinstance(change, dict):
        change = json.dumps(json.loads(path.read_text()) | change)
    path.write_text(str(change))
    return folder


def _of_model_files(inputs: Inputs, folder: Path) -> list[Mistake]:
    settings = json.loads((inputs.model / "config.json").read_text())
    layers = settings["num_hidden_layers"]
    inner = settings["intermediate_size"]
    vocabulary = settings["vocab_size"]
    added = {"content": "<new>", "id": vocabulary, "special": True}
    weights, tokenizer = "model.safetensors", "tokenizer.json"
    table: list[tuple[str, str, object, str]] = [
        ("a size as text", "config.json", {"hidden_size": "64"}, "hidden_size is '64'"),
        ("no attention heads", "config.json", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("a model without model_type", "config.json", {"model_type": None}, "it has no model_type"),
        ("an unknown activation", "config.json", {"hidden_act": "sulu"}, "hidden_act is 'sulu'"),
        ("unknown rotary positions", "config.json", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type is 'ntk'"),
        ("quantized weights", "config.json", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("config.json nested too deeply", "config.json", "[" * 100_000, "no readable config.json"),
        ("a layer too few", "config.json", {"num_hidden_layers": layers + 1}, f"model.layers.{layers}."),
        ("another intermediate_size", "config.json", {"intermediate_size": 2 * inner}, "mlp.gate_proj.weight has shape"),
        ("another num_key_value_heads", "config.json", {"num_key_value_heads": 1}, "self_attn.k_proj.weight has shape"),
        ("weights of another format", weights, "\x02" + 7 * "\0" + "[]", "has no readable header"),
        ("a tokenizer of another model", tokenizer, {"added_tokens": [added]}, f"has token {vocabulary} ('<new>')"),
        ("a torn tokenizer", tokenizer, "{torn", "the tokenizer cannot be loaded"),
        ("a chat template that fails", "chat_template.jinja", "{{ raise_exception('no') }}", "fails on a plain question"),
        ("a chat template with a syntax error", "chat_template.jinja", "{% for", "fails on a plain question"),
    ]  # fmt: skip
    listed = []
    for index, (name, file, change, fix) in enumerate(table):
        path = _copy(inputs, folder / f"model{index}", file, change)
        listed.append(Mistake(name, _check(inputs, f"model.path={path}"), fix))

    bare = folder / "bare"
    shutil.copytree(inputs.model, bare)
    (bare / tokenizer).unlink()
    listed.append(
        Mistake("no vocabulary", _check(inputs, f"model.path={bare}"), "has no tokenizer")
    )  # fmt: skip
    return listed


def _of_graders(inputs: Inputs, folder: Path) -> list[Mistake]:
    torn = _copy(inputs, folder / "torn_model", "tokenizer.json", "{torn")
    # A judge of characters cannot read the words of the shipped template.
    judge = [
        "reward=judge",
        "reward.max_prompt_tokens=32",
        "reward.max_response_tokens=8",
    ]
    numbers = 'reward.template="{{ prompt }}{{ response }}"'
    table = [
        ("a judge with a torn tokenizer", [*judge, f"reward.model.path={torn}"], "the tokenizer cannot be loaded"),
        ("a judge that cannot read its question", [*judge, f"reward.model.path={inputs.model}"], "cannot encode"),
        ("a judge without space for its question", [*judge, f"reward.model.path={inputs.model}", numbers,
         "reward.max_prompt_tokens=1"], "tokens without a response"),
        ("a template with an unknown field", [*judge, f"reward.model.path={inputs.model}",
         'reward.template="{{ response }}{{ extra.hint }}"'], "no attribute 'hint'"),
        ("a token that is not set", ["reward=http", "reward.url=http://127.0.0.1:9", "reward.token_env=NOPE"],
         "no such environment variable"),
    ]  # fmt: skip
    return [Mistake(name, _check(inputs, *own), fix) for name, own, fix in table]


def _of_files_and_commands(inputs: Inputs, folder: Path) -> list[Mistake]:
    own = folder / "broken.yaml"
    own.write_text("run:\n  name: [a\nmodel: {\n")
    base = folder / "base.yaml"
    base.write_text("defaults: [grpoo]\n")
    unpaired = folder / "unpaired.jsonl"
    unpaired.write_text('{"prompt": "1+1=", "completion": "2", "label": true}\n')
    full = folder / "full"
    full.joinpath("checkpoints", "step_00000002").mkdir(parents=True)
    full.joinpath("metrics.jsonl").write_text('{"step": 1}\n')

    return [
        Mistake("broken YAML", ("check", "--config-name", str(own)), "line"),
        Mistake(
            "a misspelt default",
            ("check", "--config-name", str(base)),
            "Did you mean grpo?",
        ),
        Mistake("--config", ("check", "--config", "own.yaml"), "--config-name"),
        Mistake("an unknown root config", ("check", "--config-name", "gpro"), "grpo"),
        Mistake("a misspelt command", ("chekc",), "check"),
        Mistake(
            "a run that exists, run.resume=none",
            _check(inputs, f"run.dir={full}", "run.resume=none"),
            "run.resume",
        ),
        Mistake(
            "generate to a format that is not read",
            ("generate", "--output", "a.csv", "--config-name", "grpo"),
            "Let it end in .jsonl or .parquet",
        ),
        Mistake(
            "pairs of a loss of single responses",
            _check(inputs, "algorithm=online_dpo", "preference.loss=kto"),
            "Use a loss of pairs",
        ),
        Mistake(
            "single responses for a loss of pairs",
            (
                "check",
                "--config-name",
                "dpo",
                f"model.path={inputs.model}",
                f"data.train_path={unpaired}",
                "data.validation_path=null",
                "run.evaluate_every=0",
            ),
            "preference.loss=kto",
        ),
        Mistake(
            "export of a wrong path",
            ("export", str(folder / "nothing"), str(folder / "exported")),
            "nothing",
        ),
        Mistake(
            "export of a folder that is no run",
            ("export", str(inputs.model), str(folder / "exported")),
            "checkpoint",
        ),
        Mistake(
            "ledger of a folder that is no run",
            ("ledger", str(inputs.model)),
            "Give the folder of a run",
        ),
        Mistake(
            "export --best of a run that got worse",
            ("export", str(_worse(inputs, folder)), str(folder / "exported"), "--best"),
            f"Use the model that the run began with, {inputs.model}",
        ),
    ]


def _worse(inputs: Inputs, folder: Path) -> Path:
    """Write the folder of a run that was best before its first step."""
    run = folder / "worse"
    store = write_checkpoints(inputs.config("ppo", run), 2)
    checkpoint = store.open(store.root / "step_00000002")
    best = {"name": "val-core/sums/acc/mean@1", "step": 0, "value": 0.5}
    store.replace_state(checkpoint, checkpoint.state | {"best": best})
    return run


def main() -> int:
    """Print the table, and return 1 if an answer has a fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = [(mistake, make(mistake, folder)) for mistake in mistakes(folder)]

    verbose = "--verbose" in sys.argv
    for mistake, answer in answers:
        faults = "; ".join(answer.faults(mistake)) or "right"
        print(
            f"{mistake.name:42} {answer.cpu_s:5.1f} s {answer.num_lines:3} lines  {faults}"
        )
        if verbose:
            print("\n".join(f"    {line}" for line in answer.text.splitlines()))
    return any(answer.faults(mistake) for mistake, answer in answers)


if __name__ == "__main__":
    sys.exit(main())
