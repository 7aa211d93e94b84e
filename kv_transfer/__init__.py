"""Move KV blocks between engines.

Decides nothing about requests, models or scheduling: its methods take request ids, block ids, token
counts and tickets, and its only view of KV memory is ``kv_transfer.connector.KVDeviceIO``.
"""
