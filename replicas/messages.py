"""Wire structs between an engine and its clients: msgpack, tagged, positional, never pickled.

A client sends one `ClientMessage` a frame. The engine sends one `EngineFrame` per step and client,
in order and on one socket, so that a snapshot never overtakes the tokens that it accounts for.
Appending a field keeps older peers working; any other change must raise `PROTOCOL_VERSION`.
"""

from typing import Literal, get_args

import msgspec

from kv_transfer.block_hash import Image
from kv_transfer.connector import TransferInfo, TransferStats
from kv_transfer.store import StoreCounters
from replicas.config import LogprobsMode, Role, SchedulingPolicy
from replicas.errors import InvalidRequestError
from replicas.kv_groups import KVGroup
from replicas.sampling_params import MAX_LOGPROBS, SamplingParams

PROTOCOL_VERSION = 8

MAX_REQUEST_ID_CHARS = 256
"""Longest request id that an engine accepts."""

RequestMode = Literal["local", "prefill", "decode"]
"""Which part of a request runs on this engine.

- local: prompt and output.
- prefill: the prompt and the first token; the KV is kept for the ticket's consumer.
- decode: slot and blocks are reserved here, and the prompt's KV comes from a prefill engine.
"""

FinishReason = Literal["stop", "length", "abort", "error"]

AbortReason = Literal["stop", "abort"]
"""stop: the client has all that it needs, as after a stop string, which engines do not check.
abort: the rest of the output is not wanted."""

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with running requests: end them, let them end, or freeze them."""
PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)

LAPSED = "the reservation lapsed before it was activated"
"""Error of the `TokenOutput` that ends a reserved request that was not activated in time."""

KV_TRANSFER_FAILED = "kv transfer failed"
"""Error of the `TokenOutput` that ends a request whose KV did not arrive and must not be
recomputed. Followed by ": " and the connector's reason."""

NO_LOGITS = "the model's logits are no distribution: NaN or infinite"
"""Error of the `TokenOutput` that ends a request for which no token could be drawn."""

BAD_GRAMMAR = "bad grammar"
"""Begins the error of the `TokenOutput` that ends a request whose grammar cannot be used. Followed
by ": " and the reason."""

GRAMMARS_BUSY = "grammars that take too long keep all threads that compile; try again later"
"""Error of the `TokenOutput` that ends a request whose grammar could not be compiled yet."""

NO_ALLOWED_TOKEN = (
    "no token is allowed: structured_outputs, allowed_token_ids and bad_words together forbid the "
    "whole vocabulary, or the grammar has reached a limit"
)
"""Error of the `TokenOutput` that ends a request whose parameters forbid every token."""

RefusalReason = Literal["no_slot", "no_blocks", "queue_full", "draining", "duplicate", "invalid"]


class MultimodalInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Data for a run of placeholder tokens in a prompt.

    Attributes:
        modality: Kind of data, such as "image".
        offset: Index of the first placeholder in the prompt.
        length: Number of placeholders.
        content_hash: Hash of `data`. Placeholders share cached KV only under an equal hash, so it
            must be cryptographic and computed by the process that decoded the client's request.
        data: The client's data, still encoded.
    """

    modality: str
    offset: int
    length: int
    content_hash: bytes
    data: bytes


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request from the HTTP edge to the engine: created once, passed on unchanged.

    Attributes:
        request_id: Unique among all live requests; independent of the HTTP client's own id.
        prompt_token_ids: At least one token id, each inside the vocabulary.
        sampling: Validated parameters with a seed; `sampling.n` is the number of choices.
        cache_salt: Requests share cached KV, in engines and stores, only under equal salts.
        adapter: Name of the LoRA adapter to apply; "" is the base model.
        priority: Lower values run first; equal ones in order of arrival.
        tenant: Tenant that the request is accounted to; "" without accounting.
        timeout_s: Seconds from arrival after which the client stops waiting; None is no limit.
        multimodal: Data for placeholder tokens of the prompt, in order.
        session: Requests of one session prefer the same replica; "" is none.
        ttft_s: Target for the time to first token in seconds; None is the cluster's default.
        tpot_s: Target for the mean time per further token; None is the cluster's default.
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

    @property
    def images(self) -> tuple[Image, ...]:
        """Return the part of `multimodal` that two requests with common KV must have in common."""
        return tuple((m.modality, m.offset, m.length, m.content_hash) for m in self.multimodal)

    def check_supported(self) -> None:
        """Refuse features that the wire format carries but engines do not support yet.

        Raises:
            InvalidRequestError: The request uses one; `param` names it.
        """
        self.sampling.check_supported()
        for param, is_asked in (("adapter", self.adapter), ("multimodal", self.multimodal)):
            if is_asked:
                raise InvalidRequestError(param, f"{param} is not supported by this engine yet")


def check_priority(priority: int, policy: SchedulingPolicy) -> None:
    """Refuse a priority that an engine would ignore. Source: vLLM engine/llm_engine.py.

    Args:
        priority: The request's priority.
        policy: The engine's scheduling policy.

    Raises:
        InvalidRequestError: It is not 0, and the policy is not "priority".
    """
    if priority and policy != "priority":
        raise InvalidRequestError(
            "priority",
            f"priority is {priority}, but requests run in order of arrival: leave it out, or set "
            "scheduling_policy: priority",
        )


def checked_request(
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    cache_salt: str = "",
    priority: int = 0,
) -> EngineRequest:
    """Create a request and check the types of its values.

    A frozen struct checks no types on creation, and an engine drops messages that it cannot decode.

    Raises:
        InvalidRequestError: A value has a wrong type, or uses a feature that engines do not support
            yet; the message says which.
    """
    request = EngineRequest(request_id, prompt_token_ids, sampling, cache_salt, priority=priority)
    try:
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequestError("request", f"a value has a wrong type: {error}") from error
    decoded.check_supported()
    return decoded


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Client's introduction, answered by a snapshot on its output socket.

    Attributes:
        protocol_version: The client's `PROTOCOL_VERSION`.
        follows_prefixes: Whether the client follows the prefix caches: it gets a listing and then
            every change. A client that missed a change sends another Hello.
    """

    protocol_version: int
    follows_prefixes: bool = False


class AddRequest(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Order to run a request, or to reserve capacity for it.

    Answered by exactly one `Accepted` or `Refused`, even if aborted. Requests of one id, each
    aborted before the next, are answered in order, and a request's answer precedes its other
    events.

    Attributes:
        request: What to generate.
        mode: Which part of the request runs here.
        dp_group: The DP group to use, or -1 for the engine's choice.
        ticket: For mode prefill: the sealed ticket under which the prompt's KV may be fetched.
        token_ids: For mode decode, when continuing another engine's stream: for each choice the
            tokens that the client already has. Capacity for these is reserved, too.
    """

    request: EngineRequest
    mode: RequestMode = "local"
    dp_group: int = -1
    ticket: bytes | None = None
    token_ids: list[list[int]] = []


class LoadKV(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Order to fetch a reserved request's KV; a later one replaces an earlier one.

    Attributes:
        request_id: The reserved request.
        ticket: The sealed ticket to fetch it with.
        epoch: The client's number for this attempt, with which `KVLoaded` answers.
    """

    request_id: str
    ticket: bytes
    epoch: int


class LendKV(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """Order to let the ticket's consumer fetch the KV of a request that keeps running here.

    Only full blocks are sent, as they are no longer written to. If blocks cannot be lent, or are
    freed before they were sent, the consumer sees a failed transfer.

    Attributes:
        request_id: The running request.
        ticket: The sealed ticket, which also states the number of tokens.
        epoch: The client's number for this attempt; `KVLoaded` answers an invalid ticket with it.
    """

    request_id: str
    ticket: bytes
    epoch: int


class Activate(msgspec.Struct, frozen=True, array_like=True, tag="activate"):
    """Order to start decoding a reserved request.

    A request that was reserved with tokens continues with the KV that has arrived by then.

    Attributes:
        request_id: The reserved request.
        token_ids: For each choice the tokens that the client already has, drawn by the prefill
            engine or by a lost decode engine; empty if no prefill will come and the prompt is to be
            computed here.
    """

    request_id: str
    token_ids: list[list[int]]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Order to drop requests; their slots and blocks are free at the next step.

    Unknown ids and those of other clients are ignored, as in `LoadKV`, `LendKV` and `Activate`.

    Attributes:
        request_ids: The requests.
        reason: The finish reason under which they are counted.
        choices: The choices of each request to drop; the others continue. Empty: all of them.
    """

    request_ids: list[str]
    reason: AbortReason = "abort"
    choices: list[int] = []


class Utility(msgspec.Struct, frozen=True, array_like=True, tag="utility"):
    """Call of a method of the engine core by name; answered by `UtilityResult`.

    Attributes:
        call_id: Chosen by the client.
        method: One of the core's utility methods.
        args: Its arguments, for a method that has some.
    """

    call_id: int
    method: str
    args: list[object] = []


ClientMessage = Hello | AddRequest | LoadKV | LendKV | Activate | Abort | Utility


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted", gc=False):
    """Acceptance of a request.

    Attributes:
        request_id: The request.
        dp_group: Its DP group, or -1 while it is queued.
        slot: Its global slot, or -1 while it is queued.
        num_cached_tokens: Prompt tokens whose KV is cached here (mode decode: need not be sent).
        handle: The number of choice 0 in `TokenColumns`; choice i has `handle + i`. Never reused by
            this incarnation.
        num_choices: Number of choices.
    """

    request_id: str
    dp_group: int
    slot: int
    num_cached_tokens: int
    handle: int
    num_choices: int = 1


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", gc=False):
    """Refusal of a request; the engine keeps no state of it."""

    request_id: str
    reason: RefusalReason
    message: str


class KVLoaded(msgspec.Struct, frozen=True, array_like=True, tag="kv_loaded", gc=False):
    """End of the transfer into a reserved request, or failure to lend a request's KV.

    Attributes:
        request_id: The request.
        epoch: Epoch of the `LoadKV` or `LendKV` that this answers.
        failure: None, or the connector's reason; reservation or stream continue in either case.
    """

    request_id: str
    epoch: int
    failure: str | None


UNKNOWN_RANK = 0
"""Rank of a token that a device has drawn, if it returned the log probability of that alone."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of a token at one position.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        rank: Its rank among all tokens, 1 for the likeliest; or `UNKNOWN_RANK`.
    """

    token_id: int
    logprob: float
    rank: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, tag="tokens", gc=False):
    """New tokens of one choice of a request.

    On the wire it is used where `TokenColumns` does not suffice: the first tokens that an engine
    sends of a choice, an end, log probabilities. Readers convert all rows of columns to this type
    (`replicas.columns`).

    Attributes:
        request_id: The request.
        index: Output index of the first of `token_ids`, by which readers drop duplicates.
        token_ids: New tokens; may be empty with a finish reason.
        finish_reason: Set on the last output of a choice.
        stop_reason: The stop token id that ended it, if one did.
        num_cached_tokens: Prompt tokens found in the prefix cache or in a store.
        error: Reason, with finish_reason "error", which ends all choices.
        choice: Index of the choice, from 0.
        logprobs: If requested: for each position the drawn token first, then the likeliest ones.
        prompt_logprobs: If requested, with the first token: for each position of the prompt its
            token first, then the likeliest ones. The first position, which nothing predicts, has
            none.
        embedding: If requested, with the first token: the prompt's embedding of length 1, (N,)
            float32, little-endian; N is the model's hidden size.
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
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    embedding: bytes | None = None


class TokenColumns(msgspec.Struct, frozen=True, array_like=True, tag="columns", gc=False):
    """Next tokens of choices of many requests, one column per value.

    Each row continues at the output index after the choice's previous row or `TokenOutput`.

    Attributes:
        handles: Handles of the choices, from `Accepted`.
        token_ids: Their tokens, concatenated.
        counts: Number of tokens of each choice, at least 1; empty if all are 1.
    """

    handles: list[int]
    token_ids: list[int]
    counts: list[int] = []


class UtilityResult(msgspec.Struct, frozen=True, array_like=True, tag="utility_result"):
    """Answer to `Utility`: a result that msgpack can encode, or an error text."""

    call_id: int
    result: object = None
    error: str | None = None


class NotGreeted(msgspec.Struct, frozen=True, array_like=True, tag="not_greeted", gc=False):
    """Answer to a client that the engine does not know, or has dropped.

    All earlier requests of that client are gone. The only event in its frame.
    """


EngineEvent = Accepted | Refused | KVLoaded | TokenOutput | UtilityResult | NotGreeted
"""Events as readers see them."""
WireEvent = EngineEvent | TokenColumns
"""Events as they are sent."""


def num_pairs(start: int, end: int) -> int:
    """Return the number of pairs (token, attended token) for the tokens `start` to `end`."""
    return (end * end - start * start) // 2


class GroupSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Load of one DP group.

    Attributes:
        num_empty_slots: Free decode slots.
        num_free_blocks: For each KV group the number of free or evictable blocks.
        num_running: Running sequences, each with a slot.
        num_reserved: Sequences with a slot that wait for their KV.
        num_waiting: Queued sequences bound to this group.
        num_context_tokens: Tokens of the sequences with a slot, prompts not yet computed included.
        max_context_tokens: The longest of these.
        num_prompt_tokens: Prompt tokens still to be computed before all sequences with a slot, and
            all that are queued for this group, can decode; plus an equal share of those queued for
            any group. KV that comes from other engines is excluded.
        num_prompt_pairs: Pairs (token, attended token) of these: attention's share of the work.
        num_prompts: Number of sequences with such tokens, counted in the same way.
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
    """Work and duration of one step.

    DP groups step together, so each number is the maximum over the groups.

    Attributes:
        num_rows: Decoding rows.
        num_context_tokens: Tokens of KV that these rows read.
        max_context_tokens: Of the longest of them.
        num_prompts: Rows that compute prompt tokens: more than one token, or a first one.
        num_prompt_tokens: Tokens that these rows compute.
        num_prompt_pairs: Pairs (token, attended token) of these.
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
    """Load and free capacity of an engine, ordered by `seq` per incarnation. Authoritative.

    Attributes:
        seq: Number of the snapshot.
        draining: Whether the engine refuses new requests, or is paused.
        num_waiting: Queued sequences.
        num_waiting_tokens: Tokens that the queued sequences have to compute, prefixes that may be
            cached included. Choices count those that they do not share with choice 0.
        num_steps: Steps so far.
        groups: Its DP groups.
        role: The engine's present role.
        step_s: Seconds that the host waited for the device in the latest step with decodes; 0 at
        first.
        decode_step: The latest step of decodes only that differed from its predecessor.
        prompt_step: The latest step with prompts.
        hands_over: Whether decoding requests should move to other engines that have room, because
            this engine is about to stop or to change its role.
        epoch: Number of times that it reopened after draining; the role is constant in an epoch.
        paused: Whether it keeps new requests queued until it is resumed, so that they may wait.
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
    paused: bool = False


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", gc=False):
    """Blocks that have entered the prefix cache.

    Attributes:
        block_hashes: Their names (`kv_transfer.block_hash.block_names`), in order.
        group_idx: Index of their KV group in the engine, from 0.
    """

    block_hashes: list[int]
    group_idx: int = 0


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", gc=False):
    """Blocks that have left the prefix cache; see `BlockStored`."""

    block_hashes: list[int]
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """Removal of all blocks of all KV groups from the prefix cache."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""Named and structured like vLLM's events (vllm/distributed/kv_events.py).

A block's name depends on all tokens up to its end, so neither parents nor tokens are sent."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Changes of one DP group's prefix cache since the previous batch.

    Attributes:
        seq: Number of the batch in this group. A listing has the number of the latest batch that it
            includes.
        data_parallel_rank: The DP group.
        events: In order.
        is_listing: Whether this is the full content, which replaces all earlier batches.
    """

    seq: int
    data_parallel_rank: int
    events: list[KVEvent]
    is_listing: bool = False


class EngineFrame(msgspec.Struct, frozen=True, array_like=True):
    """Output of one engine step for one client; empty as a heartbeat.

    Attributes:
        incarnation: The engine's incarnation.
        events: In order; `replicas.columns` reads them.
        snapshot: Taken after the events, if it is new to the client.
        stalled_s: Seconds that the engine has been in one step, if that is too long
            (`replicas.watchdog`); the engine makes no progress until a frame says 0 again.
        kv_events: Batches of the DP groups with changes, for a client that follows them.
    """

    incarnation: str
    events: list[WireEvent] = []
    snapshot: EngineSnapshot | None = None
    stalled_s: float = 0.0
    kv_events: list[KVEventBatch] = []


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Constant properties of an engine; `EngineSnapshot` has its changing load.

    Attributes:
        incarnation: Random id of this start of the engine.
        public_key: Key that authenticates the engine on all its sockets, see `kv_transfer.curve`.
        input_endpoint: ROUTER socket that receives `ClientMessage` frames.
        output_endpoint: ROUTER socket that sends `EngineFrame` frames.
        kv_endpoints: Addresses of its KV connector, in order of preference; None without one.
        kv_layout_hash: Equal on engines that can exchange KV without conversion, even with
            different block sizes; None without a connector.
        kv_groups: The model's KV groups, with the blocks of each DP group.
        model: Folder of the served model.
        max_model_len: Longest sequence.
        vocab_size: Token ids are below this.
        eos_token_ids: The model's end tokens.
        dp_groups: Number of DP groups.
        slots_per_group: Decode slots of each DP group.
        max_num_batched_tokens: Token budget of a step.
        pid: Process id on its host.
        max_logprobs: Most tokens whose log probabilities it reports at a position; -1 is no limit.
        scheduling_policy: Whether requests run in order of arrival or of priority.
        logprobs_mode: Whether it reports log probabilities or logits.
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
    max_logprobs: int = MAX_LOGPROBS
    scheduling_policy: SchedulingPolicy = "fcfs"
    logprobs_mode: LogprobsMode = "raw_logprobs"


class GroupCounters(msgspec.Struct, kw_only=True):
    """Counters and gauges of one DP group since the engine's start; blocks per KV group.

    Attributes:
        window_blocks_freed: KV blocks that sequences have left behind a window of attention.
    """

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
    window_blocks_freed: int = 0
    requests_finished: dict[str, int] = {}


class HostSeconds(msgspec.Struct):
    """Host time of an engine's steps outside the model, by activity.

    Attributes:
        schedule: Scheduling.
        prepare: Building inputs, and calling the model, without the time inside it.
        sample: Drawing tokens on the host, or reading those drawn by the device.
        update: Applying a step's results: ended requests, blocks, events.
        transfer: Reading KV for other engines, and handling received KV.
        frames: Assembling frames and snapshots for clients.
        encode: Encoding frames and passing them to the socket.
    """

    schedule: float = 0.0
    prepare: float = 0.0
    sample: float = 0.0
    update: float = 0.0
    transfer: float = 0.0
    frames: float = 0.0
    encode: float = 0.0


class DraftCounters(msgspec.Struct):
    """Totals of speculative decoding.

    Attributes:
        num_drafts: Rows of steps that verified drafts.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Those that were right.
        num_accepted_tokens_per_pos: Right ones by their position among a row's drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class ExpertCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a model's experts.

    Attributes:
        num_tokens: For each expert this engine's tokens that it has had, in all layers.
        num_rows: Rows that experts of this engine have computed, its own and those of other ranks.
        imbalance: Tokens of a layer's busiest expert over the mean of all; mean over the layers.
    """

    num_tokens: list[int] = []
    num_rows: int = 0
    imbalance: float = 0.0


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """All counters of one engine, read between two steps.

    Attributes:
        num_waiting: Queued sequences.
        num_steps: Steps that computed tokens.
        scheduled_tokens: Tokens computed by these steps.
        device_seconds: Time inside the generator.
        host_seconds: Other time of the steps; zero for an engine with modelled time.
        groups: Counters of the DP groups.
        transfer: Counters of the KV connector; all zero without one.
        kv_recompute_tokens: Prompt tokens computed here because their KV did not arrive.
        num_stalls: Turns of the core thread that exceeded the stall limit.
        drafts: Counters of speculative decoding; all zero without it.
        experts: Load of the experts; all zero without them.
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
    drafts: DraftCounters = msgspec.field(default_factory=DraftCounters)
    experts: ExpertCounters = ExpertCounters()


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker of an engine runs.

    Attributes:
        pid: Its process.
        generator: Module and name of its generator class.
        dtype: Dtype of the configuration.
        num_threads: Threads that compute on the host.
        peak_resident_bytes: Most memory of the process so far.
    """

    pid: int
    generator: str
    dtype: str
    num_threads: int
    peak_resident_bytes: int


class KVTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the utility method "kv_transfers": transfers under way.

    Attributes:
        transfers: Unfinished transfers in either direction.
        num_leased_blocks: Blocks leased to consumers; see `kv_transfer.connector.TransferStats`.
        num_reserved_blocks: Blocks that wait for KV to arrive.
        num_quarantined_blocks: Blocks that must not be reused yet.
        store: This engine's totals for the store; None without one.
    """

    transfers: list[TransferInfo] = []
    num_leased_blocks: int = 0
    num_reserved_blocks: int = 0
    num_quarantined_blocks: int = 0
    store: StoreCounters | None = None
