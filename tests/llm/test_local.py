"""A frozen model in this process: what it says, and what that cost."""

from jax_ragrl.errors import EffectError
from jax_ragrl.llm import local
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.llm.kinds import LocalLLMConfig
from jax_ragrl.llm.local import LocalLLM
from jax_ragrl.run.models import load_llm
from jax_ragrl.sampling.sampler import Shapes, sample_jobs
from jax_ragrl.types import LLMRequest, Message, Sampling
from tests.tiny import split_policy, tokenizer


def asked(text: str, limit: int = 4, temperature: float = 1.0) -> LLMRequest:
    sampling = Sampling(temperature, max_tokens=limit)
    return LLMRequest("answer", (Message("user", text),), sampling)


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


def test_equal_greedy_requests_need_one_sample(monkeypatch):
    batches = []

    def sample(model, tokenizer, jobs, width, shapes):
        batches.append(len(jobs))
        return sample_jobs(model, tokenizer, jobs, width, shapes)

    monkeypatch.setattr(local, "sample_jobs", sample)
    llm = LocalLLM(split_policy(), tokenizer(), Shapes((32,), (2,), max_new_tokens=4))
    greedy = [asked("film", temperature=0.0)._replace(seed=i) for i in (1, 2)]
    warm = [asked("film")._replace(seed=i) for i in (1, 2)]
    first, second = llm.complete(greedy)
    assert batches == [1] and first == second and second.completion_tokens == 4
    llm.complete(warm)
    assert batches == [1, 2]
    assert llm.complete(greedy[:1]) == [first]


def test_a_limit_of_replies_is_below_that_of_requests():
    config = LocalLLMConfig("tiny", max_tokens=3)
    llm = load_llm(config, None, "", Shapes((64,), (2,), max_new_tokens=8, kept_contexts=256))
    assert llm._shapes.kept_contexts == 0  # its prompts continue no conversation
    (reply,) = llm.complete([asked("who directed the film", limit=8)])
    assert reply.completion_tokens <= 3
