"""Writes docs/vllm-options.md: what options of vLLM's engine and of `vllm serve` mean here.

python scripts/vllm_options_page.py
"""

from __future__ import annotations

from pathlib import Path

from replicas.vllm_options import OPTIONS

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/vllm-options.md"

_INTRODUCTION = """# Options of vLLM

## Of its engine

What options of vLLM's engine mean here, in `args.engine` of a config file and as arguments of
`LLM`. Made from `replicas/vllm_options.py` by `python scripts/vllm_options_page.py`; a test keeps
it true. Any other key must be one of [configuration.md](configuration.md), or is refused.

| option | effect | meaning |
|---|---|---|
"""


_FRONT_END = """
## Of `vllm serve`

What stands in place of the options of vLLM 0.32's HTTP server. `ttserve` reads a config file, so
none of them is an argument.

| option of `vllm serve` | here |
|---|---|
"""

FRONT_END = {
    "MODEL, `--model`": "`args.model`",
    "`--served-model-name`": "`args.model_name`, one or several",
    "`--host`, `--port`": "`http_options.host` and `http_options.port`; operators have a port of"
    " their own, the next one",
    "`--uds`": "not offered: TCP alone",
    "`--root-path`": "`args.ingress.root_path`",
    "`--api-key`, `VLLM_API_KEY`": "`args.ingress.api_keys`, a file of hashed keys with tenants and"
    " limits; it guards every route but health checks, not only `/v1` ([keys.md](keys.md))",
    "`--ssl-certfile`, `--ssl-keyfile`": "`TTSERVE_TLS_CERTIFICATE`, one PEM file with certificate,"
    " chain and key ([SECURITY.md](../SECURITY.md))",
    "`--ssl-ca-certs`, `--ssl-cert-reqs`": "not offered: clients show keys, no certificates",
    "`--ssl-ciphers`": "not offered: TLS 1.2 or later with HAProxy's ciphers",
    "`--enable-ssl-refresh`": "HAProxy reads the file again when a replica comes or goes",
    "`--allowed-origins`": "`args.ingress.cors_origins`, none by default",
    "`--allowed-methods`, `--allowed-headers`, `--allow-credentials`": "fixed: the API's methods,"
    " every header, no credentials",
    "`--middleware`": "not offered: put a proxy in front",
    "`--enable-request-id-headers`": "always on: every answer has `x-request-id`",
    "`--enable-log-requests`, `--disable-log-requests`, `--max-log-len`, `--enable-log-outputs`,"
    " `--enable-log-deltas`": "prompts and outputs are never logged",
    "`--disable-uvicorn-access-log`, `--disable-access-log-for-endpoints`, `--uvicorn-log-level`,"
    " `--log-config-file`": "`logging_config` of the config file, which is Ray Serve's",
    "`--log-error-stack`, `VLLM_SERVER_DEV_MODE`": "unexpected errors are logged with their stack",
    "`--disable-log-stats`": "no log of statistics; `/metrics` on the operators' port",
    "`--disable-fastapi-docs`, `--enable-offline-docs`": "`/docs` and `/openapi.json` are always"
    " there, with no script and nothing from other hosts; with keys they need one",
    "`--h11-max-incomplete-event-size`, `--h11-max-header-count`": "fixed limits of HAProxy, and"
    " `args.ingress.max_body_bytes`",
    "`--chat-template`": "the template of the model's folder",
    "`--chat-template-content-format`": "`string`: contents are texts",
    "`--trust-request-chat-template`": "`args.ingress.trust_request_chat_template`",
    "`--default-chat-template-kwargs`": "not offered: send `chat_template_kwargs`",
    "`--response-role`": "not offered: `assistant`",
    "`--return-tokens-as-token-ids`": "a field of each request",
    "`--enable-auto-tool-choice`": "on with `args.tool_call_parser`",
    "`--tool-call-parser`, `--reasoning-parser`": "`args.tool_call_parser`,"
    " `args.reasoning_parser`, the same names ([tools.md](tools.md))",
    "`--tool-parser-plugin`, `--tool-server`": "not offered",
    "`--exclude-tools-when-tool-choice-none`": "not offered: tools are always in the prompt",
    "`--enable-prompt-tokens-details`": "`args.ingress.prompt_tokens_details`",
    "`--enable-server-load-tracking`": "always on: `/load`",
    "`--enable-force-include-usage`": "not offered: send `stream_options`",
    "`--enable-per-request-metrics`": "not offered; `args.ingress.route_header` shows the times of"
    " a request that asks for them",
    "`--enable-tokenizer-info-endpoint`": "not offered",
    "`--tokens-only`": "not offered: `/inference/v1/generate` is always there",
    "`--fingerprint-mode`, `--fingerprint-value`": "not offered: answers have no fingerprint",
    "`--lora-modules`": "not offered: engines apply no adapters",
    "`--api-server-count`": "`args.ingress.replicas`",
    "`--data-parallel-*`, `--headless`": "`args.pools` and `tt_data_parallel`",
    "`--max-num-queued-reqs`": "`args.ingress.max_ongoing_requests`,"
    " `args.router.max_queued_requests`",
    "`--generation-config`": "`args.generation_config`",
    "`--kv-transfer-config`": "`args.kv_connector`, `args.kv_store`",
    "`--shutdown-timeout`": "`drain_timeout_s` of a pool",
}
"""What an operator of `vllm serve` sets here instead, by option."""


def page() -> str:
    """Return the whole document."""
    rows = (
        f"| `{option.name}` | {option.effect} | {option.meaning[0].upper()}{option.meaning[1:]} |"
        for option in OPTIONS
    )
    front_end = (f"| {option} | {here} |" for option, here in FRONT_END.items())
    return "\n".join([_INTRODUCTION + "\n".join(rows), _FRONT_END + "\n".join(front_end), ""])


def main() -> None:
    """Write the page."""
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()
