"""The life of one request: its prompts become jobs, and their answers go to the client, whole or as they come.

The event loop only passes data on. Requests are parsed, rendered and tokenized in threads, where large ones do not
delay small ones, and large answers become JSON in threads too. What a request asks for is counted before it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

from trillora.engine.sampling import Sampling
from trillora.errors import TrilloraError, as_error
from trillora.generation.prompts import PromptTooLong
from trillora.serving.answers import ChatForm, CompletionForm, Usage, joined
from trillora.serving.engine import QueueFull, Stopping
from trillora.serving.job import AnswerPiece, Job
from trillora.serving.protocol import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    HttpError,
    Options,
    in_words,
    parse,
)
from trillora.serving.served import PROMPTS_AT_ONCE, Served, Service
from trillora.serving.stream import ClientGone, EventSender, Inbox, Receive, Send, as_events, as_json, watching

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
RETRY_SECONDS = 5
LARGE_BODY = 64 << 10  # bytes
LARGE_PIECE = 64  # tokens with their probabilities, which become JSON in a thread

Encoded = list[tuple[int, ...]]
Form = ChatForm | CompletionForm


@dataclass(frozen=True)
class Ask:
    """What a request asks for. Does not hold the request, whose objects may need 30 times the memory of its body."""

    served: Served
    prompts: Encoded
    options: Options
    form: Form
    limit: int | None  # tokens of an answer
    num_top: int = 0
    scores_prompt: bool = False

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * (self.options.n or 1)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Completions:
    """Answers the requests of both kinds. The methods return the JSON of a whole answer, or None after a stream."""

    def __init__(self, service: Service) -> None:
        self._service = service
        texts = {name: model.prompts.token_text for name, model in service.models.items()}
        self._token_texts = {name: lru_cache(2**16)(text) for name, text in texts.items()}
        # A template can use its two seconds on a large request, so those have a thread of their own.
        self._for_small = ThreadPoolExecutor(PROMPTS_AT_ONCE - 1, thread_name_prefix="encoder")
        self._for_large = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    def close(self) -> None:
        for threads in (self._for_small, self._for_large):
            threads.shutdown(wait=False, cancel_futures=True)
        for served in self._service.models.values():
            served.prompts.close()

    async def chat(self, body: bytes, receive: Receive, send: Send) -> str | None:
        box = [body]
        del body
        ask = await self._prepared(self._ask_chat, box, receive)
        return await self._answer(ask, receive, send)

    async def complete(self, body: bytes, receive: Receive, send: Send) -> str | None:
        box = [body]
        del body
        ask = await self._prepared(self._ask_completion, box, receive)
        return await self._answer(ask, receive, send)

    def served(self, name: str) -> Served:
        if name not in self._service.models:
            known = ", ".join(self._service.models)
            raise HttpError(
                404, f"There is no model {name[:200]!r}. Models: {known}.", param="model", code="model_not_found"
            )
        return self._service.models[name]

    async def _prepared(self, prepare: Callable[[bytes], Ask], box: list[bytes], receive: Receive) -> Ask:
        """`box` has the body, and nothing else does: the queue of the threads keeps what was cancelled."""
        threads = self._for_large if len(box[0]) > LARGE_BODY else self._for_small
        future = asyncio.get_running_loop().run_in_executor(threads, lambda: prepare(box.pop()))
        try:
            async with watching(receive, future.cancel):
                return await future
        except asyncio.CancelledError:
            if future.cancelled() and not _is_cancelled():
                raise ClientGone from None
            raise
        finally:
            box.clear()

    def _ask_chat(self, body: bytes) -> Ask:
        request: ChatRequest = parse(ChatRequest, body)
        served, longest = self.served(request.model), self._service.engine.max_length
        messages = [message.plain() for message in request.messages]
        with _errors_of("messages"):
            prompt = served.prompts.encode(messages, request.chat_template_kwargs, max_tokens=longest)
        num_top = (request.top_logprobs or 0) if request.logprobs else 0
        limit = request.max_completion_tokens or request.max_tokens
        form = ChatForm(served.name, self._token_texts[served.name], with_logprobs=bool(request.logprobs))
        prompts = [tuple(prompt)]
        self._check_prompts(served, prompts, "messages")
        return self._checked(Ask(served, prompts, request.options(), form, limit, num_top))

    def _ask_completion(self, body: bytes) -> Ask:
        request: CompletionRequest = parse(CompletionRequest, body)
        served, n = self.served(request.model), request.n or 1
        given = request.prompts
        if n * len(given) > MOST_CHOICES:
            raise HttpError(400, f"A request may have at most {MOST_CHOICES} answers.", param="n")
        scores_prompt = bool(request.echo) and request.logprobs is not None
        if request.max_tokens == 0 and not scores_prompt:
            raise HttpError(400, "max_tokens may be 0 only with echo and logprobs.", param="max_tokens")
        with _errors_of("prompt"):
            prompts = [_tokens(served, prompt, self._service.engine.max_length) for prompt in given]
        self._check_prompts(served, prompts, "prompt")
        form = CompletionForm(
            served.name,
            self._token_texts[served.name],
            with_logprobs=request.logprobs is not None,
            echo=[text for prompt in prompts for text in [served.prompts.decode(prompt)] * n] if request.echo else None,
        )
        limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        ask = Ask(served, prompts, request.options(), form, limit, request.logprobs or 0, scores_prompt)
        return self._checked(ask)

    def _check_prompts(self, served: Served, prompts: Encoded, param: str) -> None:
        """Prompts must fit the cache, and the model must have their tokens: another one gives NaN."""
        longest = self._service.engine.max_length
        for prompt in prompts:
            if not prompt:
                raise HttpError(400, "The prompt is empty.", param=param)
            if len(prompt) >= longest:
                what = f"The prompt has {len(prompt)} tokens. Prompt and answer together may have {longest}."
                raise HttpError(400, what, param=param, code="context_length_exceeded")
            if not 0 <= min(prompt) <= max(prompt) < served.num_tokens:
                what = f"The prompt has tokens that this model does not have: they are 0 to {served.num_tokens - 1}."
                raise HttpError(400, what, param=param)

    def _checked(self, ask: Ask) -> Ask:
        """Answers must fit the queue and the memory."""
        engine = self._service.engine
        longest, most = engine.max_length, engine.num_rows + engine.max_waiting
        if ask.num_answers > most:  # not 429: it would never be answered
            raise HttpError(400, f"This server can give at most {most} answers to a request.", param="n")
        num_tokens = sum(_answer_length(ask, longest, p) + (len(p) if ask.scores_prompt else 0) for p in ask.prompts)
        if ask.form.with_logprobs and (ask.options.n or 1) * num_tokens * (1 + ask.num_top) > MOST_LOGPROBS:
            what = f"A request may ask for at most {MOST_LOGPROBS:,} log-probabilities. Use a smaller max_tokens or n."
            raise HttpError(400, what, param="max_tokens")
        return ask

    async def _answer(self, ask: Ask, receive: Receive, send: Send) -> str | None:
        """Runs the jobs of a request and sends their answers, whole or as they come."""
        inbox = Inbox(ask.num_answers)
        jobs = self._jobs(ask, inbox)
        self._submit(jobs)
        try:
            async with watching(receive, inbox.leave):
                if ask.options.stream:
                    await _stream(inbox, ask, send)
                    return None
                pieces: list[list[AnswerPiece]] = [[] for _ in jobs]
                async for arrived in inbox:
                    for index, piece in arrived:
                        if piece.error is not None:
                            raise _as_http(piece.error)
                        pieces[index].append(piece)
                return await asyncio.to_thread(_whole, ask, pieces)
        finally:
            self._service.engine.cancel(jobs)

    def _submit(self, jobs: Sequence[Job]) -> None:
        try:
            self._service.engine.submit(jobs)
        except (QueueFull, Stopping) as error:
            raise _as_http(error) from None

    def _jobs(self, ask: Ask, inbox: Inbox) -> list[Job]:
        options, longest = ask.options, self._service.engine.max_length
        n = options.n or 1
        seed = secrets.randbits(32) if options.seed is None else options.seed % 2**32
        sampling = Sampling(
            1.0 if options.temperature is None else options.temperature,
            1.0 if options.top_p is None else options.top_p,
            options.top_k or 0,
            seed,
        )
        return [
            Job(
                ask.served.name,
                prompt,
                _answer_length(ask, longest, prompt),
                inbox.receiver(number * n + choice),
                sampling if options.seed is not None else sampling._replace(seed=(seed + number) % 2**32),
                number=choice,
                stop_tokens=() if options.ignore_eos else ask.served.prompts.stops,
                stop_texts=options.stops,
                num_top=ask.num_top,
                scores_prompt=ask.scores_prompt,
            )
            for number, prompt in enumerate(ask.prompts)
            for choice in range(n)
        ]


def _whole(ask: Ask, pieces: list[list[AnswerPiece]]) -> str:
    answers = [joined(some) for some in pieces]
    usage = Usage(ask.num_prompt_tokens, sum(answer.num_tokens for answer in answers))
    whole = ask.form.whole(answers, usage)
    choices = map(as_json, whole.pop("choices"))  # one by one: other threads stop while Python writes JSON
    return f'{as_json(whole)[:-1]},"choices":[{",".join(choices)}]}}'


async def _stream(inbox: Inbox, ask: Ask, send: Send) -> None:
    sender = EventSender(send)
    await sender.open()
    try:
        await _send_events(inbox, ask, sender)
    except ClientGone:
        raise
    except Exception as error:
        await sender.fail(as_error(error))
        raise


async def _send_events(inbox: Inbox, ask: Ask, sender: EventSender) -> None:
    form, num_written = ask.form, [0] * ask.num_answers
    await sender.events([chunk for index in range(len(num_written)) if (chunk := form.opening(index)) is not None])
    async for arrived in inbox:
        if not arrived:
            await sender.keep_alive()
        for index, piece in arrived:
            if piece.error is not None:
                await sender.fail(piece.error)
                return
            num_written[index] = piece.num_tokens
            if len(piece.chosen) + len(piece.prompt) > LARGE_PIECE:
                await sender.text(await asyncio.to_thread(_as_text, form, index, piece))
            else:
                await sender.events(form.parts(index, piece))
    if ask.options.wants_usage:
        await sender.events([form.usage(Usage(ask.num_prompt_tokens, sum(num_written)))])
    await sender.close()


def _as_text(form: Form, index: int, piece: AnswerPiece) -> str:
    return as_events(form.parts(index, piece))


def _tokens(served: Served, prompt: str | list[int], longest: int) -> tuple[int, ...]:
    """A text is continued as it is, without the chat template."""
    return tuple(served.prompts.encode_text(prompt, max_tokens=longest) if isinstance(prompt, str) else prompt)


def _answer_length(ask: Ask, longest: int, prompt: Sequence[int]) -> int:
    return min(longest if ask.limit is None else ask.limit, longest - len(prompt))


@contextlib.contextmanager
def _errors_of(param: str) -> Iterator[None]:
    """Templates and texts are not trusted: any failure is the request's."""
    try:
        yield
    except TrilloraError as error:
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        raise HttpError(400, in_words(error), param=param, code=code) from None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_http(error: TrilloraError) -> HttpError:
    """A failure of the engine. Clients repeat the request by themselves, except where it would fail again."""
    if isinstance(error, QueueFull):
        return HttpError(429, in_words(error), code="queue_full", headers={"retry-after": str(RETRY_SECONDS)})
    if isinstance(error, Stopping):
        return HttpError(503, in_words(error), code="stopping", headers={"retry-after": str(RETRY_SECONDS)})
    return HttpError(500, in_words(error), headers={"x-should-retry": "false"})
