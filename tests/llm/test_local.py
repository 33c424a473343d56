"""A frozen model in this process: what it says, and what that cost."""

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.tiny import split_policy, tokenizer


def asked(text: str, limit: int = 4) -> LLMRequest:
    return LLMRequest("answer", (Message("user", text),), Sampling(max_tokens=limit))


def test_replies_count_their_tokens_and_long_prompts_fail_alone():
    shapes = Shapes(prompt_lengths=(32,), batch_sizes=(2,), max_new_tokens=4)
    llm = LocalLLM(split_policy(), tokenizer(), shapes)
    requests = [asked("film"), asked("film " * 40), asked("film who", limit=2)]
    first, long, second = llm.complete(requests)
    assert isinstance(long, EffectError) and "tokens is longer than 32" in str(long)
    for request, reply, limit in ((requests[0], first, 4), (requests[2], second, 2)):
        assert isinstance(reply, MeteredReply)
        assert reply.prompt_tokens == len(tokenizer().chat(request.messages))
        assert 1 <= reply.completion_tokens <= limit
    assert first.completion_tokens == 4  # a random model stops nowhere
