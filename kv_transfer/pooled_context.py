"""State shared by the loads and the saves of one pooled worker."""

from dataclasses import dataclass

from kv_transfer.layout import ROW_TOKENS
from kv_transfer.store_thread import StoreExecutor
from kv_transfer.transfer_context import TransferContext


@dataclass(slots=True, eq=False, kw_only=True)
class PoolContext(TransferContext):
    """`TransferContext` with the store's executor and the size of a unit.

    Attributes:
        executor: Runs the calls of the store.
        unit_tokens: Tokens of a unit.
    """

    executor: StoreExecutor
    unit_tokens: int

    @property
    def unit_rows(self) -> int:
        """Rows of a unit."""
        return self.unit_tokens // ROW_TOKENS

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit's KV."""
        return self.unit_rows * self.io.layout.row_bytes

    @property
    def chunk_rows(self) -> int:
        """Rows to copy at once: whole blocks, because a device moves nothing smaller."""
        layout = self.io.layout
        num_blocks = self.config.chunk_bytes // layout.bytes_per_block
        return max(1, num_blocks) * layout.rows_per_block
