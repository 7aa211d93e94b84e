"""The engine: pure scheduler and batch, the model runner, and the process around them."""
