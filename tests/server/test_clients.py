"""64 clients at once: each gets exactly the tokens that it gets alone."""

from __future__ import annotations

import asyncio
import itertools

import openai
import pytest

from tinyvllm_ref import LLM

from .serving import MODEL, alone, served

STARTS = [
    "Once upon a time",
    "The dog",
    "One sunny morning",
    "Tim was sad because",
    "Mia and Ben",
    "It was",
    "A",
    "Lily",
]


def questions(count: int):
    """Prompts of several lengths, greedy and drawn, short and long."""
    for number, start in zip(range(count), itertools.cycle(STARTS), strict=False):
        options = {
            "max_tokens": 16 + number % 5 * 16,
            "temperature": (0.0, 0.7, 1.0)[number % 3],
            "seed": number,
        }
        yield " ".join([start] * (1 + number % 7)), options


async def ask_all(url: str, asked):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        async def ask(prompt, options):
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **options)
            return "".join([choice.text async for chunk in stream for choice in chunk.choices])

        return await asyncio.gather(*(ask(*one) for one in asked))


@pytest.mark.parametrize("count", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_each_of_many_clients_gets_what_it_gets_alone(reference, count):
    with served(LLM(MODEL, num_blocks=2048, max_num_seqs=64)) as server:
        asked = list(questions(count))
        texts = asyncio.run(ask_all(server.url, asked))
    for text, (prompt, options) in zip(texts, asked, strict=True):
        assert text == alone(reference, prompt, **options).outputs[0].text
