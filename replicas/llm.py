"""LLM: offline generation from a model folder, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from replicas.beam_search import BeamSearch, BeamSearchOutput
from replicas.client import InprocClient, SyncMPClient
from replicas.config import EngineConfig
from replicas.errors import ConfigError, InvalidRequestError, ModelLoadError
from replicas.generation_config import read_sampling_defaults
from replicas.llm_engine import LLMEngine, check_characters, to_engine_input
from replicas.sampling_params import SamplingParams
from replicas.tokenizer import Tokenizer
from replicas.vllm_options import engine_options as translated_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from replicas.beam_search import BeamSearchParams
    from replicas.client import SyncEngineClient
    from replicas.llm_engine import Prompt, RequestOutput
    from replicas.messages import EngineMetrics, TokenLogprob, WorkerDescription
    from replicas.sampling_params import GenerationConfigSource, Pooling

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"
"""Turns with `role` and `content`."""

_KV_BYTES_OFFLINE = 512 * 2**20
"""Default KV memory offline, where one engine has the host to itself."""


def offline_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return the configuration of an engine that has the host to itself.

    Args:
        model: Model folder.
        options: Further fields of `EngineConfig`, or vLLM's names of them.

    Raises:
        ConfigError: An option is unknown or has a value that it cannot have.
    """
    fields = translated_options(options)
    if "gpu_memory_utilization" not in fields:
        fields.setdefault("kv_cache_memory_bytes", _KV_BYTES_OFFLINE)
    try:
        config = msgspec.convert({"model": str(model), **fields}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine options: {error}") from error
    config.validate()
    return config


class LLM:
    """Model for offline generation; as a context manager it ends the engine on exit.

    Args:
        model: Folder of the model.
        multiprocess: Whether to run the engine in its own process; False steps it on this thread,
            which is not possible for a third-party class on a mesh.
        skip_tokenizer_init: Load no tokenizer; prompts and outputs are token ids.
        seed: Base seed for requests without a seed.
        generation_config: Source of the default sampling parameters: "auto" is the model's
            generation_config.json, "vllm" neutral values.
        **engine_options: Further fields of `EngineConfig`.

    Raises:
        ConfigError: The options and the model do not fit.
        EngineStartError: The engine process could not start; says why.
    """

    def __init__(
        self,
        model: str,
        *,
        multiprocess: bool = True,
        skip_tokenizer_init: bool = False,
        seed: int = 0,
        generation_config: GenerationConfigSource = "auto",
        **engine_options: Any,  # noqa: ANN401 - of EngineConfig or vLLM, checked by these
    ) -> None:
        config = offline_config(model, engine_options)
        self._defaults = read_sampling_defaults(model, generation_config)
        self._tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(model)
        with _progress_bar() as bar:
            task = bar.add_task("starting", total=1.0)

            def show(stage: str, fraction: float) -> None:
                bar.update(task, description=stage, completed=fraction)

            client: SyncEngineClient = (
                SyncMPClient(config, progress=show) if multiprocess else InprocClient(config, show)
            )
        self._client = client
        self.llm_engine = LLMEngine(client, self._tokenizer, seed)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: One prompt or several, each text or a list of token ids.
            sampling_params: For all of them, or one for each; None takes
                `get_default_sampling_params`.
            use_tqdm: Show a progress bar.
            priority: For each prompt its priority: lower ones run first, with the engine option
                `scheduling_policy="priority"`. None is 0 for all of them.

        Returns:
            The finished requests, in the order of the prompts.

        Raises:
            InvalidRequestError: A prompt or a parameter can never work; the others are dropped.
            EngineDeadError: The engine died.
        """
        batch = _as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_for_each(sampling_params, len(batch))
        priorities = [0] * len(batch) if priority is None else priority
        if len(priorities) != len(batch):
            raise ValueError(f"got {len(priorities)} priorities for {len(batch)} prompts")
        request_ids: list[str] = []
        try:
            requests = zip(batch, params, priorities, strict=True)
            for number, (prompt, param, rank) in enumerate(requests, start=1):
                with _named(f"prompt {number} of {len(batch)}"):
                    request_ids.append(self.llm_engine.add_request(prompt, param, priority=rank))
            return self._run(request_ids, show=use_tqdm)
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template.

        Args:
            messages: One conversation or several, each a list of turns with `role` and `content`.
            sampling_params: For all of them, or one for each; None takes
                `get_default_sampling_params`.
            add_generation_prompt: Open the assistant's turn at the end of each.
            tools: Tools for the template, as OpenAI's API has them. As in vLLM, calls stay in the
                text of the answer.
            chat_template_kwargs: Further variables of the template.
            use_tqdm: Show a progress bar.

        Returns:
            The answers, in the order of the conversations.

        Raises:
            ModelLoadError: The tokenizer was skipped.
            InvalidRequestError: A conversation has no turn, the template refuses it, or see
                `generate`; no conversation is answered then.
        """
        if self._tokenizer is None:
            raise ModelLoadError("chat needs a tokenizer; remove skip_tokenizer_init=True")
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Conversation]", [messages] if is_one else messages)
        prompts: list[Prompt] = []
        for number, conversation in enumerate(conversations, start=1):
            with _named(f"conversation {number} of {len(conversations)}"):
                if not conversation:
                    raise InvalidRequestError("messages", "it has no turn")
                text = self._tokenizer.apply_chat_template(
                    list(conversation), add_generation_prompt, chat_template_kwargs, tools
                )
                check_characters("prompt", text)
                prompts.append(self._tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[npt.NDArray[np.float32]]:
        """Embed texts: pool the final hidden states of each prompt.

        Args:
            prompts: One prompt or several, each text or a list of token ids.
            pooling: "last" takes the state of the last token, "mean" the mean of all.
            truncate_prompt_tokens: See `SamplingParams`.
            use_tqdm: Show a progress bar.

        Returns:
            For each prompt a vector (N,) of length 1, N the model's hidden size.

        Raises:
            InvalidRequestError: See `generate`.
            RequestRefusedError: The model's generator gives no hidden states.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        found = [output.embedding for output in self.generate(prompts, params, use_tqdm=use_tqdm)]
        assert all(each is not None for each in found), "requested, and the engine obeys"
        return [np.frombuffer(each or b"", dtype="<f4") for each in found]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest continuations of prompts.

        Every step asks the engine for the next token of every sequence, whose KV the prefix cache
        has.

        Args:
            prompts: One prompt or several, each text or a list of token ids.
            params: Width, length and length penalty.
            use_tqdm: Show a progress bar for each step.

        Returns:
            The best sequences of each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: See `generate`, or a parameter is out of range, or the engine
                reports no log probabilities.
        """
        tokenizer, facts = self._tokenizer, self._client.description
        params.validate(facts.max_logprobs, facts.logprobs_mode)
        sampling = params.one_token()
        batch = _as_list(prompts)
        searches = []
        for number, prompt in enumerate(batch, start=1):
            with _named(f"prompt {number} of {len(batch)}"):
                token_ids, _ = to_engine_input(prompt, sampling, tokenizer, facts)
            eos = self.llm_engine.eos_token_ids
            searches.append(BeamSearch(token_ids, params, eos, facts.max_model_len))
        while live := [(search, beam) for search in searches for beam in search.live]:
            asked: list[Prompt] = [beam.tokens for _, beam in live]
            answers = iter(self.generate(asked, sampling, use_tqdm=use_tqdm))
            for search in searches:
                if search.live:
                    search.extend([_likeliest(next(answers)) for _ in search.live])
        return [BeamSearchOutput(search.best(tokenizer)) for search in searches]

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None if it was skipped."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that come without any."""
        return self._defaults.params()

    def get_metrics(self) -> EngineMetrics:
        """Return every counter of the engine; must not run during `generate`."""
        return self._client.metrics()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached blocks.

        Args:
            reset_running_requests: Whether running requests lose their blocks, too, and compute
                their tokens again.

        Returns:
            Whether no request keeps KV from before; always True without the option.
        """
        return self._client.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def collective_rpc(self, method: str) -> list[WorkerDescription]:
        """Call a method of every worker; must not run during `generate`.

        Args:
            method: One of `replicas.engine.core.WORKER_METHODS`.

        Raises:
            EngineError: It is not one of these.
        """
        return self._client.collective_rpc(method)

    def shutdown(self) -> None:
        """End the engine. Idempotent."""
        self.llm_engine.close()
        self._client.shutdown()

    def _run(self, request_ids: list[str], *, show: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with _progress_bar(disable=not show) as bar:
            task = bar.add_task("generating", total=len(request_ids))
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if output.finished:
                        finished[output.request_id] = output
                        bar.advance(task)
        return [finished[r] for r in request_ids]


def _progress_bar(*, disable: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        disable=disable,
        transient=True,
    )


def _likeliest(output: RequestOutput) -> list[TokenLogprob]:
    """Return the likeliest tokens at the one position of an output."""
    [choice] = output.outputs
    assert choice.logprobs is not None, "requested, and the engine obeys"
    [[_drawn, *likeliest]] = choice.logprobs
    return likeliest


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Prefix refusals with the name of the refused prompt."""
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(error.param, f"{what}: {error}") from error


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a batch; a flat list of token ids is a single prompt."""
    if isinstance(prompts, list | tuple) and (
        not prompts or isinstance(prompts[0], str | bytes | list | tuple)
    ):
        return list(prompts)
    return [prompts]  # type: ignore[list-item]


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"got {len(params)} sampling parameters for {count} prompts; give one, or one each"
        )
    return list(params)
