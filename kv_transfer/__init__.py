"""Transfer of KV blocks between engines.

Nothing here decides about requests, models or scheduling. Methods take request ids, block ids,
token counts and tickets. ``kv_transfer.connector.KVDeviceIO`` is the only view of KV memory.
"""
