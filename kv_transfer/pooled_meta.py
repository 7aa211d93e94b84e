"""Messages between the two sides of the pooled connector in a step. Plain data."""

from msgspec import Struct

from kv_transfer.connector import BlockTables, ConnectorMeta, TransferResults


class LookupSpec(Struct, frozen=True, array_like=True):
    """Prompt to look up.

    Attributes:
        request_id: The request.
        keys: Keys of its units, from position 0.
        timeout_s: Seconds after which the pool counts as having none of them.
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
        first_unit: Number of the first unit to load.
        keys: Keys of the units to load.
        start_row: First row to write, within the first unit; the rows before it are already here.
        end_row: One past the last row to write, within the last unit or at its end.
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
    """Message of one step from scheduler side to worker side; fields in order of execution.

    Attributes:
        drops: Requests whose lookup and saves end now; results do not name them.
        lookups: Prompts to look up.
        loads: Loads to start.
        cancels: Requests whose load ends now; results name them.
        saves: Units that this step's forward completes.
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
        saved: Requests whose announced units have all been read.
    """

    saved: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Return whether the snapshot holds anything."""
        return bool(self.sent or self.received or self.failed or self.found or self.saved)
