"""Users of a server that speaks the OpenAI completions API, each with one request at a time, and how fast it answers.

Of the standard library, so that it runs wherever the server does; `vllm bench serve` wants a tokenizer and packages
that a build of vLLM may lack. A thread a user is enough: it wakes once a token.
"""

# C users at a time, P tokens of a prompt, T tokens of an answer

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mreader.errors import MreaderError, UsageError

_PATIENCE = 600  # seconds between two tokens
# Whatever proxy the environment names, it is not for a server on this machine.
open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Load:
    """What every user asks for.

    input_len:  P, random tokens of a prompt
    output_len: T, tokens of an answer, no more and no fewer
    requests:   of each user, one after the other
    """

    input_len: int = 128
    output_len: int = 128
    requests: int = 3

    def __post_init__(self) -> None:
        if self.input_len < 1:
            raise UsageError(f"input len is {self.input_len}", "a prompt has at least one token")
        if self.output_len < 2:
            raise UsageError(f"output len is {self.output_len}", "a time per token takes answers of at least two")
        if self.requests < 1:
            raise UsageError(f"requests is {self.requests}", "every user asks at least once")


@dataclass(frozen=True)
class Answer:
    """When one request was sent, and when its first and its last of T tokens arrived: seconds of one clock."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def time_to_first_token(self) -> float:
        return self.first - self.sent

    @property
    def time_per_token(self) -> float:
        """TPOT: of the tokens after the first."""
        return (self.last - self.first) / (self.tokens - 1)


@dataclass(frozen=True)
class Served:
    """What C users saw.

    tpot:       median over the answers of the seconds between two tokens
    ttft:       median seconds to the first token
    throughput: tokens of all answers a second, from the first request to the last token
    """

    concurrency: int
    tpot: float
    ttft: float
    throughput: float

    @property
    def user_rate(self) -> float:
        """Tokens a second that a user reads along with."""
        return 1 / self.tpot

    @classmethod
    def of(cls, concurrency: int, answers: Sequence[Answer]) -> "Served":
        seconds = max(answer.last for answer in answers) - min(answer.sent for answer in answers)
        return cls(
            concurrency,
            median(answer.time_per_token for answer in answers),
            median(answer.time_to_first_token for answer in answers),
            sum(answer.tokens for answer in answers) / seconds,
        )


@dataclass(frozen=True)
class Client:
    """The server at `url`, and the name by which it knows its model.

    vocabulary: prompts are of tokens below
    prompts:    what draws them: no two are alike, so that nothing is found in the server's prefix cache
    """

    url: str
    model: str
    vocabulary: int
    prompts: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def of(cls, url: str, vocabulary: int) -> "Client":
        """The first model of the server at `url`."""
        with _open(urllib.request.Request(f"{url}/v1/models")) as response:
            return cls(url, json.load(response)["data"][0]["id"], vocabulary)

    def measure(self, concurrency: int, load: Load) -> Served:
        """C users who all begin at once. MreaderError where the server refuses, or answers otherwise than asked."""
        prompts = [[self._draw(load.input_len) for _ in range(load.requests)] for _ in range(concurrency)]

        def use(own: list[list[int]]) -> list[Answer]:
            return [self._ask(prompt, load.output_len) for prompt in own]

        users = ThreadPoolExecutor(concurrency)
        try:
            return Served.of(concurrency, [answer for answers in users.map(use, prompts) for answer in answers])
        finally:  # who is interrupted, or refused, does not wait for the other users' answers
            users.shutdown(wait=False, cancel_futures=True)

    def _draw(self, tokens: int) -> list[int]:
        return [self.prompts.randrange(self.vocabulary) for _ in range(tokens)]

    def _ask(self, prompt: list[int], tokens: int) -> Answer:
        asked = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        sent = time.perf_counter()
        with _open(request) as response:
            events = [(time.perf_counter(), event) for event in _events(response)]
        return _as_answer(sent, events, tokens)


@contextmanager
def _open(request: urllib.request.Request) -> Iterator[Any]:
    """The response. MreaderError for whatever the connection comes to while it is open."""
    try:
        with open_here(request, timeout=_PATIENCE) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise MreaderError(f"the server refuses: {error.read().decode(errors='replace')}") from error
    except (OSError, http.client.HTTPException) as error:
        raise MreaderError(f"the server at {request.full_url} cannot be asked: {error}") from error


def _events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, up to the one that says that there are no more."""
    for line in lines:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield data


def _as_answer(sent: float, events: Iterable[tuple[float, bytes]], tokens: int) -> Answer:
    """The answer that arrived in `events`. MreaderError where it has not as many tokens as were asked for."""
    times, written = [], 0
    for arrived, data in events:
        event = json.loads(data)
        if "error" in event:
            raise MreaderError(f"the server broke off: {event['error']}")
        if event["choices"]:
            times.append(arrived)
        if event.get("usage"):
            written = event["usage"]["completion_tokens"]
    if written != tokens or len(times) < 2:
        raise MreaderError(
            f"the server wrote {written} tokens in {len(times)} pieces, {tokens} were asked for",
            "a longer --max-model-len, or no --stream-interval, may be what it lacks",
        )
    return Answer(sent, times[0], times[-1], tokens)
