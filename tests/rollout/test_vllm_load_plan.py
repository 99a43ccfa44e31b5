"""What a plan takes from the wire in place, and what it has to copy."""

import pytest
import torch

from verl_ray.rollout.vllm_load_plan import (
    Copy,
    Elements,
    LoadRecorder,
    ParameterPlan,
)

pytestmark = pytest.mark.vllm

# A parameter [5, 4] of two tensors: three rows of one, then two of the other.
UPPER, LOWER = "upper", "lower"
PLAN = ParameterPlan(
    torch.Size((5, 4)),
    torch.float32,
    (
        Copy(UPPER, Elements(0, (3, 4), (4, 1)), Elements(0, (3, 4), (4, 1))),
        Copy(LOWER, Elements(0, (2, 4), (4, 1)), Elements(12, (2, 4), (4, 1))),
    ),
)


def test_neighbours_on_the_wire_are_one_tensor_without_a_copy() -> None:
    wire = torch.arange(40.0)
    upper, lower = wire[8:20].view(3, 4), wire[20:28].view(2, 4)
    joined = PLAN.joined({UPPER: upper, LOWER: lower})
    assert joined is not None and joined.data_ptr() == upper.data_ptr()
    assert torch.equal(joined, torch.arange(8.0, 28.0).view(5, 4))


def test_what_lies_otherwise_is_copied_to_its_place() -> None:
    wire = torch.arange(40.0)
    lower, upper = wire[0:8].view(2, 4), wire[8:20].view(3, 4)
    others = [
        {UPPER: upper, LOWER: lower},
        {UPPER: upper, LOWER: wire[24:32].view(2, 4)},
        {UPPER: upper.double(), LOWER: lower.double()},
        {UPPER: upper, LOWER: wire[20:28].view(2, 4).clone()},
    ]
    for received in others:
        assert PLAN.joined(received) is None
        whole = torch.empty(5, 4)
        PLAN.fill(whole, received)
        expected = torch.cat([received[UPPER], received[LOWER]])
        assert torch.equal(whole, expected.float())


def test_a_parameter_comes_in_parts() -> None:
    parts = {UPPER: torch.ones(3, 4), LOWER: torch.zeros(2, 4)}
    whole = torch.full((5, 4), 7.0)
    for name, part in parts.items():
        assert PLAN.joined({name: part}) is None
        PLAN.fill(whole, {name: part})
    assert torch.equal(whole, torch.cat(list(parts.values())))


@pytest.mark.parametrize("fills_buffer", [False, True])
def test_there_is_a_plan_if_tensors_go_to_parameters_alone(fills_buffer: bool) -> None:
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(3)))
    model.register_buffer("scale", torch.zeros(3))
    recorder = LoadRecorder(model)
    received = {"weight": torch.ones(3), "scale": torch.ones(3)}
    with torch.no_grad(), recorder.recording(received):
        model.get_parameter("weight").copy_(received["weight"])
        if fills_buffer:
            model.get_buffer("scale").copy_(received["scale"])
    assert (recorder.plan() is None) == fills_buffer
