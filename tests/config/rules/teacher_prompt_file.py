"""A function of a user's that writes prompts."""

from verl_ray.rewards.request import ScoreRequest


def hint(request: ScoreRequest) -> str:
    return f"{request.answer}: {request.prompt}"
