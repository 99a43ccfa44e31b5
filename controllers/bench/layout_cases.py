"""The layouts of megatron that `verl-ray bench layouts` compares with the plain engine.

Invariant: a case is one model on so many ranks with settings of the megatron backend,
and two cases never differ in anything else. Deliberately not here: how they are
compared (`layouts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Settings = dict[str, int | str | bool]
Head = Literal["policy", "value"]

MOE = "qwen3_moe"
"""The model whose layers are mixtures of experts."""

_SHORT_NAMES = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "pipeline_parallel": "pp",
    "virtual_stages": "vpp",
    "expert_parallel": "ep",
    "expert_tensor_parallel": "etp",
}


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    world: int
    settings: Settings
    model: str = "qwen3"
    head: Head = "policy"

    @property
    def name(self) -> str:
        """The layout in the papers' notation, such as "tp2 sp pp2".

        The remaining ranks are data-parallel, written as dp.
        """
        parts = [
            f"{_SHORT_NAMES[key]}{size}"
            for key, size in self.settings.items()
            if key in _SHORT_NAMES
        ]
        if "sequence_parallel" in self.settings:
            parts.append("sp")
        if "recompute" in self.settings:
            parts.append(f"recompute {self.settings['recompute']}")

        dp_size = self.world
        for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            dp_size //= int(self.settings.get(key, 1))
        if dp_size > 1:
            parts.append(f"dp{dp_size}")

        return " ".join(parts) or "one rank"


_TP: Settings = {"tensor_parallel": 2}
_SP: Settings = {"tensor_parallel": 2, "sequence_parallel": True}
_PP: Settings = {"pipeline_parallel": 2}
_VPP: Settings = {"pipeline_parallel": 2, "virtual_stages": 2}
_CP: Settings = {"context_parallel": 2}
_EP: Settings = {"expert_parallel": 2}
_ETP: Settings = {"expert_tensor_parallel": 2}
_RECOMPUTE: Settings = {"recompute": "full"}

CASES = (
    Case(1, {}),
    Case(1, _RECOMPUTE),
    Case(1, {"recompute": "selective"}),
    Case(1, {}, "llama"),
    Case(1, {}, "qwen2"),
    Case(1, {}, MOE),
    Case(1, {}, "qwen3", "value"),
    Case(2, {}),
    Case(2, _TP),
    Case(2, _SP),
    Case(2, _SP | _RECOMPUTE),
    Case(2, _PP),
    Case(2, _VPP),
    Case(2, _CP),
    Case(2, _TP, "llama"),
    Case(2, _PP, "llama"),
    Case(2, _SP, "qwen2"),
    Case(2, _PP, "qwen2"),
    Case(2, _SP, "qwen3", "value"),
    Case(2, _PP, "qwen3", "value"),
    Case(2, _CP, "qwen3", "value"),
    Case(2, _SP, MOE),
    Case(2, _ETP, MOE),
    Case(2, _EP, MOE),
    Case(2, _SP | _EP, MOE),
    Case(2, _SP | _ETP, MOE),
    Case(2, _PP | _RECOMPUTE, MOE),
    Case(4, _SP),
    Case(4, _PP),
    Case(4, _CP),
    Case(4, {"pipeline_parallel": 4}),
    Case(4, _SP | _PP),
    Case(4, _TP | _VPP),
    Case(4, _SP | _CP),
    Case(4, _PP | _CP),
    Case(4, {"expert_parallel": 4}, MOE),
    Case(4, _PP | _EP, MOE),
    Case(4, _SP | _EP | _ETP, MOE),
)
