"""What the two sides of the pooled connector tell each other in a step. Plain data."""

from msgspec import Struct

from kv_transfer.connector import BlockTables, ConnectorMeta, TransferResults


class LookupSpec(Struct, frozen=True, array_like=True):
    """A prompt to look up.

    Attributes:
        request_id: The request.
        keys: Keys of its units, from position 0.
        timeout_s: After this long the pool counts as having nothing.
    """

    request_id: str
    keys: tuple[bytes, ...]
    timeout_s: float


class PoolLoadSpec(Struct, frozen=True, array_like=True):
    """Start of a load.

    Attributes:
        request_id: The request.
        lane: Lane of the destination blocks.
        block_ids: The request's block tables.
        first_unit: Number of the first unit to get.
        keys: Keys of the units to get.
        start_row: First row to write; those before it are there already. In the first unit.
        end_row: First row not to write. In the last unit, or at its end.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    first_unit: int
    keys: tuple[bytes, ...]
    start_row: int
    end_row: int


class PoolSaveSpec(Struct, frozen=True, array_like=True):
    """Units that this step's forward completes.

    Attributes:
        request_id: The request.
        lane: Lane of its blocks.
        block_ids: Its block tables.
        first_unit: Number of the first of these units.
        keys: Their keys.
    """

    request_id: str
    lane: int
    block_ids: BlockTables
    first_unit: int
    keys: tuple[bytes, ...]


class PooledMeta(ConnectorMeta, frozen=True):
    """What the scheduler side tells the worker side in one step, in order of execution.

    Attributes:
        drops: Requests whose lookup and saves end now; results do not name them.
        lookups: Prompts to look up.
        loads: Loads to start.
        cancels: Requests whose load ends now; results name them.
        saves: What this step's forward will have computed.
        finished: Requests whose blocks may be freed once their saves have been read; results name
            them then.
    """

    drops: tuple[str, ...] = ()
    lookups: tuple[LookupSpec, ...] = ()
    loads: tuple[PoolLoadSpec, ...] = ()
    cancels: tuple[str, ...] = ()
    saves: tuple[PoolSaveSpec, ...] = ()
    finished: tuple[str, ...] = ()


class PooledResults(TransferResults, frozen=True):
    """``TransferResults`` with more news for the scheduler side.

    Attributes:
        saved: Requests of which nothing that was announced is left to read.
    """

    saved: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Tell whether there is anything to tell."""
        return bool(self.sent or self.received or self.failed or self.found or self.saved)
