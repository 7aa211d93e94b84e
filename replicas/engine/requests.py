"""Clients' messages about requests: their handling and checks.

Owner: the engine core. `RequestHandler` also keeps requests whose id is still used by an aborted
one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

from kv_transfer.connector import TransferRequest
from kv_transfer.errors import TransferError
from replicas.codec import MAX_FRAME_BYTES
from replicas.engine.kv_loads import failure_word
from replicas.engine.sequence import KVPlace, Phase, Sequence
from replicas.errors import InvalidRequestError
from replicas.messages import (
    MAX_REQUEST_ID_CHARS,
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    Refused,
    check_priority,
)
from replicas.sampling_params import MAX_LOGPROBS, SamplingParams, are_below

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from replicas.config import SchedulingPolicy
    from replicas.engine.outputs import ClientEvents
    from replicas.engine.role_state import RoleState
    from replicas.engine.scheduler import Scheduler
    from replicas.messages import EngineRequest, RefusalReason


logger = logging.getLogger(__name__)

RequestMessage: TypeAlias = AddRequest | LoadKV | LendKV | Activate | Abort

_REFUSALS: dict[RefusalReason, str] = {
    "no_slot": "no decode slot is free in the asked DP group",
    "no_blocks": "the KV cache has no room for the prompt now",
    "queue_full": "the queue is full",
    "draining": "the engine takes no more such requests: it drains, or has another role now",
    "duplicate": "a request of this id is live already",
}


class RequestHandler:
    """Handler of clients' messages about requests.

    Args:
        scheduler: Scheduler that runs the requests.
        checks: Checks of new requests.
        events: Receives the answers.
        role: The engine's role.
    """

    def __init__(
        self, scheduler: Scheduler, checks: RequestChecks, events: ClientEvents, role: RoleState
    ) -> None:
        self._scheduler = scheduler
        self._checks = checks
        self._events = events
        self._role = role
        self._next_handle = 1
        # Requests whose id an aborted one still uses, because the connector holds its blocks.
        self._successors: dict[str, tuple[bytes, AddRequest]] = {}

    def handle(self, client: bytes, message: RequestMessage, now_s: float) -> None:
        """Handle a client's message, unless it is about another client's request."""
        match message:
            case AddRequest():
                self._add(client, message, now_s)
            case LoadKV() | LendKV():
                if self._scheduler.table.is_of(client, message.request_id):
                    self._transfer(client, message, now_s)
            case Activate():
                if self._scheduler.table.is_of(client, message.request_id):
                    self._activate(message, now_s)
            case Abort():
                for request_id in message.request_ids:
                    self._abort(client, request_id, message)

    def client_gone(self, client: bytes) -> None:
        """Drop the requests of a client that wait for their id."""
        self._successors = {i: (c, m) for i, (c, m) in self._successors.items() if c != client}

    def add_successors(self, now_s: float) -> None:
        """Add the waiting requests whose id is free now."""
        for request_id in [i for i in self._successors if not self._scheduler.table.is_ending(i)]:
            self._add(*self._successors.pop(request_id), now_s)

    def _add(self, client: bytes, message: AddRequest, now_s: float) -> None:
        """Add or refuse a request.

        One with the id of an aborted request waits until the connector has released that one's
        blocks, because clients cannot know when this happens.
        """
        request = message.request
        problem = self._checks.problem(message)
        if problem is not None:
            self._events[client].append(Refused(request.request_id, "invalid", problem))
            return
        if not self._role.accepts(message.mode):
            self._refuse(client, request.request_id, "draining")
            return
        is_ending = self._scheduler.table.is_ending(request.request_id)
        if is_ending and request.request_id not in self._successors:
            self._successors[request.request_id] = client, message
            return
        sequences = _new_sequences(client, message, transfers=self._checks.has_connector)
        seq = sequences[0]
        enter = self._scheduler.reserve if message.mode == "decode" else self._scheduler.add
        try:
            refusal = enter(seq, now_s, sequences[1:])
        except TransferError as error:
            self._events[client].append(Refused(request.request_id, "invalid", str(error)))
            return
        if refusal is not None:
            self._refuse(client, request.request_id, refusal)
            return
        for each in sequences:
            each.handle = self._next_handle
            self._next_handle += 1
        accepted = Accepted(
            request.request_id,
            seq.place.dp_group,
            seq.place.slot,
            max(seq.place.num_cached_tokens, 0),
            seq.handle,
            len(sequences),
        )
        self._events[client].append(accepted)

    def _refuse(self, client: bytes, request_id: str, reason: RefusalReason) -> None:
        self._events[client].append(Refused(request_id, reason, _REFUSALS[reason]))

    def _transfer(self, client: bytes, message: LoadKV | LendKV, now_s: float) -> None:
        request_id, ticket = message.request_id, message.ticket
        try:
            if isinstance(message, LoadKV):
                self._scheduler.loads.load(request_id, ticket, message.epoch, now_s)
            else:
                self._scheduler.lend(request_id, ticket, now_s)
        except TransferError as error:
            logger.warning("refused the ticket of request %s: %s", message.request_id, error)
            failed = KVLoaded(message.request_id, message.epoch, failure_word(error))
            self._events[client].append(failed)

    def _abort(self, client: bytes, request_id: str, message: Abort) -> None:
        """Drop a request, or the choices that are named; the last one may be all that is left."""
        if message.choices:
            if self._scheduler.table.is_of(client, request_id):
                for choice in message.choices:
                    self._scheduler.abort_choice(request_id, choice, message.reason)
            return
        if request_id in self._successors and self._successors[request_id][0] == client:
            del self._successors[request_id]
            self._refuse(client, request_id, "duplicate")
        if self._scheduler.table.is_of(client, request_id):
            self._scheduler.abort(request_id, message.reason)

    def _activate(self, message: Activate, now_s: float) -> None:
        """Start a reserved request; fail it if its tokens cannot come from this model."""
        choices = self._scheduler.table.choices(message.request_id)
        problem = self._checks.activation_problem(choices, message)
        if problem is not None:
            seq = choices[0]
            self._scheduler.abort(message.request_id)
            self._events.fail(seq, problem)
            return
        ended = self._scheduler.activate(message.request_id, message.token_ids, now_s)
        if ended is not None:
            self._events.fail_transfer(ended)


def _new_sequences(client: bytes, message: AddRequest, *, transfers: bool) -> list[Sequence]:
    """Return the choices of a request, in order."""
    request, transfer = message.request, None
    if transfers:
        ticket = message.ticket or b""
        transfer = TransferRequest(
            request.request_id,
            request.prompt_token_ids,
            ticket,
            request.cache_salt,
            request.adapter,
            request.images,
        )
    outputs = message.token_ids or [[]] * request.sampling.n
    sequences: list[Sequence] = []
    for choice, output in enumerate(outputs):
        seq = Sequence(
            request,
            message.mode,
            client,
            [*request.prompt_token_ids, *output],
            place=KVPlace(dp_group=message.dp_group),
            transfer=None if choice else transfer,
            choice=choice,
            parent=sequences[0] if choice else None,
        )
        sequences.append(seq)
    return sequences


_INACTIVE = (Phase.RESERVED, Phase.WAITING)
"""Phases of a reserved request's choices before it is activated."""


_MAX_PROMPT_LOGPROBS = MAX_FRAME_BYTES // 22
"""Most log probabilities of one prompt: they come in one frame, and take up to 20 bytes each."""
_DEFAULTS = SamplingParams()
_WITHOUT_LOGITS = {
    "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "n", "truncate_prompt_tokens",
    "truncation_side", "skip_reading_prefix_cache",
}  # fmt: skip
_FIELDS_WITH_LOGITS = [
    name for name in SamplingParams.__struct_fields__ if name not in _WITHOUT_LOGITS
]
"""Parameters for which the host changes or reports the logits of each token."""


class RequestChecks:
    """Checks that find requests which one engine can never run.

    Args:
        num_groups: DP groups of the engine.
        max_model_len: Longest sequence in tokens.
        vocab_size: Token ids are below this.
        has_connector: Whether the engine can send and receive KV; kept as an attribute.
        tokens_per_pass: The most tokens that a pass gives a request; all of them must fit.
        max_logprobs: See `EngineConfig`.
        supports_prompt_logprobs: Whether steps can compute the logits of whole prompts.
        scheduling_policy: See `EngineConfig`.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: facts of the engine
        self,
        *,
        num_groups: int,
        max_model_len: int,
        vocab_size: int,
        has_connector: bool,
        tokens_per_pass: int = 1,
        max_logprobs: int = MAX_LOGPROBS,
        supports_prompt_logprobs: bool = True,
        scheduling_policy: SchedulingPolicy = "fcfs",
    ) -> None:
        self._num_groups = num_groups
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self.has_connector = has_connector
        self._tokens_per_pass = tokens_per_pass
        self._supports_prompt_logprobs = supports_prompt_logprobs
        self._scheduling_policy = scheduling_policy

    def problem(self, message: AddRequest) -> str | None:
        """Return why a request can never run here, or None."""
        request = message.request
        problem = self._prompt_problem(request)
        if problem is not None:
            return problem
        if not -1 <= message.dp_group < self._num_groups:
            return f"no dp_group {message.dp_group}: there are {self._num_groups}"
        try:
            request.sampling.validate(self._vocab_size, self._max_logprobs)
            request.check_supported()
            check_priority(request.priority, self._scheduling_policy)
        except InvalidRequestError as error:
            return str(error)
        problem = (
            self._block_problem(request.sampling)
            or self._pooling_problem(request.sampling)
            or self._prompt_logprobs_problem(request)
            or self._mode_problem(message)
        )
        if problem is not None:
            return problem
        return self._outputs_problem(request, message.token_ids, range(request.sampling.n))

    def _block_problem(self, sampling: SamplingParams) -> str | None:
        """Return which parameter a model cannot obey that gives several tokens at once, if any."""
        if self._tokens_per_pass > 1:
            for name in _FIELDS_WITH_LOGITS:
                if getattr(sampling, name) != getattr(_DEFAULTS, name):
                    return (
                        f"{name} needs the logits of every token, but this model gives up to "
                        f"{self._tokens_per_pass} tokens at once, and no logits"
                    )
        return None

    def _pooling_problem(self, sampling: SamplingParams) -> str | None:
        """Return why a prompt's embedding cannot be computed, or None."""
        if sampling.pooling is None or self._supports_prompt_logprobs:
            return None
        return (
            "embeddings need mixed_batches and a generator with supports_mixed_batch and "
            "supports_hidden_states, which this engine lacks"
        )

    def _prompt_logprobs_problem(self, request: EngineRequest) -> str | None:
        """Return why a prompt's log probabilities cannot be computed or sent, or None."""
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        if not self._supports_prompt_logprobs:
            return (
                "prompt_logprobs, and echo with logprobs, need mixed_batches and a generator with "
                "supports_mixed_batch and supports_hidden_states, which this engine lacks; leave "
                "them out"
            )
        num_prompt = len(request.prompt_token_ids)
        num_logprobs = num_prompt * (1 + (self._vocab_size if count == -1 else count))
        if num_logprobs > _MAX_PROMPT_LOGPROBS:
            return (
                f"prompt_logprobs of {count} for a prompt of {num_prompt} tokens are "
                f"{num_logprobs} log probabilities, but one answer has at most "
                f"{_MAX_PROMPT_LOGPROBS}; ask for fewer"
            )
        return None

    def _prompt_problem(self, request: EngineRequest) -> str | None:
        num_prompt = len(request.prompt_token_ids)
        if len(request.request_id) > MAX_REQUEST_ID_CHARS:
            return f"its id has more than {MAX_REQUEST_ID_CHARS} characters"
        if num_prompt == 0:
            return "the prompt is empty"
        # The one token that comes with an embedding has no meaning, and needs no room.
        num_output = self._tokens_per_pass if request.sampling.pooling is None else 0
        if num_prompt + num_output > self._max_model_len:
            return (
                f"the prompt has {num_prompt} tokens and max_model_len is {self._max_model_len}: "
                "there is no room for output"
            )
        if not are_below(request.prompt_token_ids, self._vocab_size):
            return f"a prompt token id is outside the vocabulary of {self._vocab_size}"
        return None

    def _mode_problem(self, message: AddRequest) -> str | None:
        if (message.mode == "prefill") != (message.ticket is not None):
            return "mode prefill needs a ticket, and only that mode takes one"
        if message.mode != "decode" and message.token_ids:
            return "only mode decode continues after output tokens"
        # Mode decode needs no connector: it can compute the prompt here.
        if message.mode == "prefill" and not self.has_connector:
            return "this engine has no KV connector; set kv_connector"
        return None

    def activation_problem(self, choices: SequenceOf[Sequence], message: Activate) -> str | None:
        """Return why no engine of this model can have drawn an activation's tokens, or None.

        Args:
            choices: The live choices of the request; tokens of others are not looked at.
            message: The activation.
        """
        if not choices:
            return None
        live = [seq.choice for seq in choices]
        problem = self._outputs_problem(choices[0].request, message.token_ids, live)
        if problem is not None:
            return problem
        for seq in choices:
            known = seq.token_ids[seq.num_prompt_tokens :]
            given = message.token_ids[seq.choice] if message.token_ids else []
            if seq.phase in _INACTIVE and known != given[: len(known)]:
                return "it was reserved with other tokens than it was activated with"
        return None

    def _outputs_problem(
        self, request: EngineRequest, tokens: list[list[int]], choices: Iterable[int]
    ) -> str | None:
        """Return why no engine of this model can have drawn a client's output tokens, or None."""
        if not tokens:
            return None
        if len(tokens) != request.sampling.n:
            return f"it has {request.sampling.n} choices, and was given tokens of {len(tokens)}"
        num_prompt = len(request.prompt_token_ids)
        for token_ids in (tokens[choice] for choice in choices):
            if num_prompt + len(token_ids) + self._tokens_per_pass > self._max_model_len:
                return (
                    f"a prompt of {num_prompt} tokens with {len(token_ids)} of output "
                    f"leaves no room below max_model_len {self._max_model_len}"
                )
            if not are_below(token_ids, self._vocab_size):
                return f"a token id is outside the vocabulary of {self._vocab_size}"
        return None
