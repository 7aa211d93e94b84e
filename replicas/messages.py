"""Wire structs between an engine and its clients: msgpack, tagged, positional, never pickled.

Client to engine: one `ClientMessage` a frame. Engine to client: one `EngineFrame` per engine step
and client, in order, on one socket, so that a snapshot never overtakes the tokens it was taken
after. Appending a field keeps older peers working; anything else raises `PROTOCOL_VERSION`.
"""

from typing import Literal

import msgspec

from kv_transfer.connector import TransferInfo, TransferStats
from kv_transfer.store import StoreCounters
from replicas.config import Role
from replicas.errors import InvalidRequestError
from replicas.kv_groups import KVGroup
from replicas.sampling_params import SamplingParams

PROTOCOL_VERSION = 7

MAX_REQUEST_ID_CHARS = 256
"""An engine refuses a request whose id is longer."""

RequestMode = Literal["local", "prefill", "decode"]
"""local: prompt and output here. prefill: prompt and first token here, the KV is kept for the
ticket's consumer. decode: slot and blocks are reserved here, the prompt's KV comes from there."""

FinishReason = Literal["stop", "length", "abort", "error"]

AbortReason = Literal["stop", "abort"]
"""stop: the client has all that it wanted, as after a stop string, of which engines know none.
abort: nobody wants the rest."""

LAPSED = "the reservation lapsed before it was activated"
"""The error of a `TokenOutput` that ends a reserved request which nobody activated in time."""

KV_TRANSFER_FAILED = "kv transfer failed"
"""With ": " and the connector's reason, the error of a `TokenOutput` that ends a request whose KV
did not come, where the engine must not compute it again."""

NO_LOGITS = "the model's logits are no distribution: NaN or infinite"
"""The error of a `TokenOutput` that ends a request for which no token could be drawn."""

RefusalReason = Literal["no_slot", "no_blocks", "queue_full", "draining", "duplicate", "invalid"]


class MultimodalInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What stands for a run of placeholder tokens of a prompt.

    Attributes:
        modality: "image", for one.
        offset: Index of the first placeholder in the prompt.
        length: How many there are.
        content_hash: Of `data`; equal placeholders share cached KV only under an equal one, so
            that it has to be a cryptographic hash, made by whoever decoded the client's request.
        data: As the client sent it, still encoded.
    """

    modality: str
    offset: int
    length: int
    content_hash: bytes
    data: bytes


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request, from the HTTP edge to the engine: made once, passed on as it is.

    Attributes:
        request_id: Unique among all live requests, whatever the client called its own.
        prompt_token_ids: At least one token id, each inside the vocabulary.
        sampling: Validated parameters with a seed; `sampling.n` says how many choices to make.
        cache_salt: Requests share cached KV, here and in a store, only under the same salt.
        adapter: Name of the LoRA adapter to apply; "" is the model as it is.
        priority: Lower ones go first; equal ones in order of arrival.
        tenant: On whose account it runs; "" where nobody keeps accounts.
        timeout_s: Seconds from its arrival after which nobody waits for it; None: no end.
        multimodal: What stands for placeholder tokens of the prompt, in order.
        session: Requests of one session like to be together; "" is none.
        ttft_s: Seconds that its first token may take; None: as long as everybody's may.
        tpot_s: Seconds that each further token may take in the mean; None: as everybody's may.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    multimodal: list[MultimodalInput] = []
    session: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None

    def check_supported(self) -> None:
        """Refuse what the seams carry and no engine does yet.

        Raises:
            InvalidRequestError: It asks for such a thing; `param` names it.
        """
        for param, is_asked in (
            ("n", self.sampling.n > 1),
            ("logprobs", self.sampling.logprobs is not None),
            ("adapter", self.adapter),
            ("multimodal", self.multimodal),
        ):
            if is_asked:
                raise InvalidRequestError(param, f"{param} is not supported by this engine yet")


def checked_request(
    request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, cache_salt: str = ""
) -> EngineRequest:
    """Make a request whose values have the types that the wire demands.

    A frozen struct checks no types when it is made; an engine would drop what it cannot decode.

    Raises:
        InvalidRequestError: A value has another type, or asks for what no engine does yet; the
            message says where.
    """
    request = EngineRequest(request_id, prompt_token_ids, sampling, cache_salt)
    try:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError("request", f"a value has a wrong type: {error}") from error
    decoded.check_supported()
    return decoded


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A client introduces itself; a snapshot on its output socket answers.

    Attributes:
        protocol_version: Its `PROTOCOL_VERSION`.
        follows_prefixes: Whether it wants to know what the prefix cache holds: a listing, and then
            every change. A client that has missed some greets again.
    """

    protocol_version: int
    follows_prefixes: bool = False


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Run a request, or reserve for it; answered by one `Accepted` or `Refused`, aborted or not.

    Those of one id, each aborted before the next, are answered in order, and nothing else is said
    of one before.

    Attributes:
        request: What to generate.
        mode: Which part of it runs here.
        dp_group: The DP group to use, or -1 for the engine's choice.
        ticket: For mode prefill: the sealed ticket under which the prompt's KV may be fetched.
        token_ids: For mode decode, of an engine that is to go on with another one's stream: for
            each choice the tokens that the client has so far; there is room for these too.
    """

    request: EngineRequest
    mode: RequestMode = "local"
    dp_group: int = -1
    ticket: bytes | None = None
    token_ids: list[list[int]] = []


class LoadKV(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Fetch a reserved request's KV with this ticket; a later one replaces an earlier one.

    Attributes:
        request_id: The reserved request.
        ticket: A sealed ticket.
        epoch: The client's number for this attempt, with which `KVLoaded` answers.
    """

    request_id: str
    ticket: bytes
    epoch: int


class LendKV(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """Let the ticket's consumer fetch the KV of a request that runs here, and go on meanwhile.

    Only blocks that are full move: nothing is written to those any more. What cannot be lent, or
    is taken away before it has gone, the consumer is told of as of any transfer that fails.

    Attributes:
        request_id: The running request.
        ticket: A sealed ticket; it says of how many of its tokens.
        epoch: The client's number for this attempt, with which `KVLoaded` answers a ticket that is
            no good.
    """

    request_id: str
    ticket: bytes
    epoch: int


class Activate(msgspec.Struct, frozen=True, array_like=True, tag="activate"):
    """Start decoding a reserved request.

    One that was reserved with tokens goes on with the KV that it has by then.

    Attributes:
        request_id: The reserved request.
        token_ids: For each choice the tokens that the client has already, which prefill, or a
            decode engine that was lost, has drawn; empty: no prefill will come, run the prompt
            here.
    """

    request_id: str
    token_ids: list[list[int]]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Drop these requests; slots and blocks are free at the next step.

    Ids that are unknown, or another client's, are ignored, as in `LoadKV`, `LendKV`, `Activate`.

    Attributes:
        request_ids: The requests.
        reason: What they count as.
    """

    request_ids: list[str]
    reason: AbortReason = "abort"


class Utility(msgspec.Struct, frozen=True, array_like=True, tag="utility"):
    """Call a method of the engine core by name; answered by `UtilityResult`.

    Attributes:
        call_id: Chosen by the client.
        method: One of the core's utility methods.
    """

    call_id: int
    method: str


ClientMessage = Hello | AddRequest | LoadKV | LendKV | Activate | Abort | Utility


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted", gc=False):
    """The engine took the request.

    Attributes:
        request_id: The request.
        dp_group: Its DP group, or -1 while it waits for one.
        slot: Its global slot, or -1 while it waits for one.
        num_cached_tokens: Prompt tokens whose KV was found here (mode decode: need not be sent).
        handle: Names it in `TokenColumns`; no other request of this incarnation ever has it.
    """

    request_id: str
    dp_group: int
    slot: int
    num_cached_tokens: int
    handle: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", gc=False):
    """The engine did not take the request and keeps nothing of it."""

    request_id: str
    reason: RefusalReason
    message: str


class KVLoaded(msgspec.Struct, frozen=True, array_like=True, tag="kv_loaded", gc=False):
    """How the transfer into a reserved request ended, or that one cannot be lent from.

    Attributes:
        request_id: The request.
        epoch: Of the `LoadKV` or `LendKV` that this is about.
        failure: None, or the connector's reason; reservation or stream stand in either case.
    """

    request_id: str
    epoch: int
    failure: str | None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How likely a token was where one was drawn.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        rank: Its place among all tokens, 1 for the likeliest.
    """

    token_id: int
    logprob: float
    rank: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    """New tokens of one choice of a request.

    On the wire it is what there is more to say of than `TokenColumns` can: an engine's first tokens
    of a request, an ending, log probabilities, another choice. A reader makes the others of the
    columns (`replicas.columns`), and sees no difference.

    Attributes:
        request_id: The request.
        index: Output index of the first of `token_ids`; lets a reader drop duplicates.
        token_ids: New tokens, possibly none with a finish reason.
        finish_reason: Set on the last output of a choice.
        stop_reason: The stop token id that ended it, if one did.
        num_cached_tokens: Prompt tokens that came from the prefix cache, or from a store.
        error: With finish_reason "error", which ends all choices: what happened.
        choice: Which of the request's choices, from 0 on.
        logprobs: If they were asked for: for each token the drawn one first, then the likeliest.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    choice: int = 0
    logprobs: list[list[TokenLogprob]] | None = None


class TokenColumns(msgspec.Struct, frozen=True, array_like=True, tag="columns", gc=False):
    """The next tokens of many requests, of which there is no more to say: a column for each value.

    Each row goes on where what was last said of its request, here or in a `TokenOutput`, has ended.

    Attributes:
        handles: The requests, by the handles that `Accepted` gave them.
        token_ids: Their tokens, one after the other.
        counts: How many each has, at least 1; empty where each has one.
    """

    handles: list[int]
    token_ids: list[int]
    counts: list[int] = []


class UtilityResult(msgspec.Struct, frozen=True, array_like=True, tag="utility_result"):
    """Answer to `Utility`: a msgpack-able result, or what went wrong."""

    call_id: int
    result: object = None
    error: str | None = None


class NotGreeted(msgspec.Struct, frozen=True, array_like=True, tag="not_greeted", gc=False):
    """The engine does not know the client that sent it a message, or has given it up.

    Whatever that client asked for before is gone. Alone in its frame.
    """


EngineEvent = Accepted | Refused | KVLoaded | TokenOutput | UtilityResult | NotGreeted
"""What readers see."""
WireEvent = EngineEvent | TokenColumns
"""What is sent."""


def num_pairs(start: int, end: int) -> int:
    """(token, token that it attends to) of the tokens from `start` to `end`."""
    return (end * end - start * start) // 2


class GroupSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Load of one DP group.

    Attributes:
        num_empty_slots: Decode positions that are free.
        num_free_blocks: For each KV group the blocks that are free or evictable.
        num_running: Sequences that hold a slot and run.
        num_reserved: Sequences that hold a slot and wait for their KV.
        num_waiting: Queued sequences that will run in this group.
        num_context_tokens: Tokens of the sequences that hold a slot, prompts to come included.
        max_context_tokens: The longest of these.
        num_prompt_tokens: Tokens that are to be computed before all of these, and all that wait for
            this group, can decode, and an equal share of those that wait for any; KV that comes
            from elsewhere is not among them.
        num_prompt_pairs: (token, token that it attends to) of these: attention's share of the work.
        num_prompts: How many sequences have such tokens, likewise.
    """

    num_empty_slots: int
    num_free_blocks: list[int]
    num_running: int
    num_reserved: int
    num_waiting: int
    num_context_tokens: int = 0
    max_context_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_prompts: int = 0


class StepWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computed, and what it took.

    DP groups step together: of each number that of the group that has most.

    Attributes:
        num_rows: Rows that decode.
        num_context_tokens: Tokens of KV that these read.
        max_context_tokens: Of the longest of them.
        num_prompts: Rows that compute more than one token, or the first ones.
        num_prompt_tokens: Tokens that these compute.
        num_prompt_pairs: (token, token that it attends to) of these.
        device_s: Seconds that the host waited for the device.
    """

    num_rows: int
    num_context_tokens: int
    max_context_tokens: int
    num_prompts: int
    num_prompt_tokens: int
    num_prompt_pairs: int
    device_s: float


class EngineSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What the engine has left: the authority's view, ordered by `seq` per incarnation.

    Attributes:
        seq: Counts the snapshots.
        draining: Whether it refuses new requests.
        num_waiting: Sequences in its queue.
        num_waiting_tokens: Prompt tokens of these.
        num_steps: Steps so far.
        groups: Its DP groups.
        role: Which part of a request it takes now.
        step_s: Seconds that it waited for its device in the latest step with decodes; 0 before one.
        decode_step: The latest step of decodes alone that was unlike the one before it.
        prompt_step: The latest step with prompts.
        hands_over: Whether what decodes here should go on elsewhere, where there is room: the
            engine has little time left, or is about to change its role.
        epoch: How often it has taken requests again after it drained: in each it has one role.
    """

    seq: int
    draining: bool
    num_waiting: int
    num_waiting_tokens: int
    num_steps: int
    groups: list[GroupSnapshot]
    role: Role = "both"
    step_s: float = 0.0
    decode_step: StepWork | None = None
    prompt_step: StepWork | None = None
    hands_over: bool = False
    epoch: int = 0


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", gc=False):
    """Blocks can be found from now on.

    Attributes:
        block_hashes: Their names (`kv_transfer.block_hash.block_names`), in order.
    """

    block_hashes: list[int]


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", gc=False):
    """Blocks cannot be found any more; see `BlockStored`."""

    block_hashes: list[int]


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """No block can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""Named and filled as vLLM's (vllm/distributed/kv_events.py). A name stands for all tokens from the
first on, so that neither parents nor tokens are said."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the prefix cache of one DP group has to tell since the batch before.

    Attributes:
        seq: Counts the batches of this group. A listing has that of the batch that it was made
            after.
        data_parallel_rank: The DP group.
        events: In order.
        is_listing: Whether this is all that is there: what was said before is void.
    """

    seq: int
    data_parallel_rank: int
    events: list[KVEvent]
    is_listing: bool = False


class EngineFrame(msgspec.Struct, frozen=True, array_like=True):
    """Everything one engine step has for one client; empty as a heartbeat.

    Attributes:
        incarnation: The engine's.
        events: In order; `replicas.columns` reads them.
        snapshot: Taken after them, if the client has not had it.
        stalled_s: How long the engine has been in one step, if that is longer than it should be
            (`replicas.engine.pulse`): nothing is to be hoped of it before a frame says 0 again.
        kv_events: For a client that follows them, of every DP group that has any.
    """

    incarnation: str
    events: list[WireEvent] = []
    snapshot: EngineSnapshot | None = None
    stalled_s: float = 0.0
    kv_events: list[KVEventBatch] = []


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, fixed for its lifetime; what it has left is in its snapshots.

    Attributes:
        incarnation: Random id of this start of the engine.
        public_key: With which it proves itself on every socket of its own, see `kv_transfer.curve`.
        input_endpoint: ROUTER socket that takes `ClientMessage` frames.
        output_endpoint: ROUTER socket that sends `EngineFrame` frames.
        kv_endpoints: Where its KV connector listens, in order of preference; None without one.
        kv_layout_hash: Equal on two engines whose KV may move between them as it is, whatever
            their block sizes; None without a connector.
        kv_groups: The model's KV groups, with the blocks of each DP group.
        model: Folder that it serves.
        max_model_len: Longest sequence.
        vocab_size: Token ids are below this.
        eos_token_ids: The model's end tokens.
        dp_groups: Number of DP groups.
        slots_per_group: Decode slots of each.
        max_num_batched_tokens: Token budget of a step.
        pid: Process id on its host.
    """

    incarnation: str
    public_key: str
    input_endpoint: str
    output_endpoint: str
    kv_endpoints: tuple[str, ...] | None
    kv_layout_hash: str | None
    kv_groups: tuple[KVGroup, ...]
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    dp_groups: int
    slots_per_group: int
    max_num_batched_tokens: int
    pid: int


class GroupCounters(msgspec.Struct, kw_only=True):
    """Counters and gauges of one DP group since the engine started; of blocks for each KV group."""

    num_running: int = 0
    num_reserved: int = 0
    num_slots: int = 0
    num_empty_slots: int = 0
    num_blocks: list[int] = []
    num_free_blocks: list[int] = []
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    requests_finished: dict[str, int] = {}


class HostSeconds(msgspec.Struct):
    """What an engine's steps cost beside the model, by what it went to, to the last byte sent.

    Attributes:
        schedule: Deciding what runs next.
        prepare: Inputs, and calls of the model but for the time inside it.
        sample: Tokens that the host draws, and taking over those of the device.
        update: Taking over a step: endings, blocks, events.
        transfer: Reading KV for other engines, and taking over what of it has come.
        frames: Putting together what clients are told, snapshots too.
        encode: Making bytes of it, and giving them to the socket.
    """

    schedule: float = 0.0
    prepare: float = 0.0
    sample: float = 0.0
    update: float = 0.0
    transfer: float = 0.0
    frames: float = 0.0
    encode: float = 0.0


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All counters of one engine, taken between two steps.

    Attributes:
        num_waiting: Sequences in the queue.
        num_steps: Steps that computed something.
        scheduled_tokens: Tokens that they computed.
        device_seconds: Time inside the generator.
        host_seconds: The steps' other time; nothing of an engine whose time is a model's.
        groups: The DP groups'.
        transfer: The KV connector's; all zero without one.
        kv_recompute_tokens: Prompt tokens that are computed here because their KV did not come.
        num_stalls: Turns of the core thread that took longer than they should.
    """

    num_waiting: int
    num_steps: int
    scheduled_tokens: int
    device_seconds: float
    host_seconds: HostSeconds
    groups: list[GroupCounters]
    transfer: TransferStats = msgspec.field(default_factory=TransferStats)
    kv_recompute_tokens: int = 0
    num_stalls: int = 0


class KVTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the utility method "kv_transfers": what is under way now.

    Attributes:
        transfers: Those that have not ended, in either direction.
        num_leased_blocks: See `kv_transfer.connector.TransferStats`, as for the next two.
        num_reserved_blocks: Blocks that wait for KV to come.
        num_quarantined_blocks: Blocks that nobody may have yet.
        store: Totals of the store, as this engine sees it; None without one.
    """

    transfers: list[TransferInfo] = []
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    num_quarantined_blocks: int = 0
    store: StoreCounters | None = None
