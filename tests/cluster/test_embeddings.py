"""Embeddings through the router, of one engine and of a prefill engine with a decode engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.cluster.engines import engine_config, model_folder, prompts, rig, running, sampling

pytestmark = pytest.mark.process


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")], ids=" and ".join)
async def test_an_embedding_reaches_the_client_whichever_engine_computes_it(roles):
    [prompt] = prompts(1, [90])
    with running(*((role, engine_config(role)) for role in roles)) as engines:
        async with rig(*engines) as made:
            request = made.request(prompt, sampling(1, pooling="mean"))
            outputs = [output async for output in made.generate(request)]
    assert outputs[-1].finish_reason == "length"
    [raw] = [output.embedding for output in outputs if output.embedding is not None]
    model = transformers.AutoModel.from_pretrained(model_folder(), dtype=torch.float32)
    with torch.no_grad():
        pooled = model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0).numpy()
    wanted = pooled / np.linalg.norm(pooled)
    np.testing.assert_allclose(np.frombuffer(raw, dtype="<f4"), wanted, atol=1e-4)
