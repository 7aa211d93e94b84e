"""`ttserve bench`: latency, throughput and serving, with vLLM's options, names and JSON keys.

arguments ─→ datasets, arrivals ─→ client (HTTP) ─→ metrics ─→ serve (table, file)
                               └─→ offline (the engine of `replicas.LLM`)
"""
